"""Files of others, in and out: draft checkpoints, tokenizers, model folders."""
