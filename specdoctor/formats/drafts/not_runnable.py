"""Draft families that are recognised by name and cannot be run here, and why."""

NOT_RUNNABLE = {
    "specforge-domino": "its correction of the logits runs a GRU over the drafted prefix, which has no engine here",
    "speculators-xpress": "its Jacobi passes over a mixed block have no engine here",
    "speculators-eagle": "the EAGLE-1 layout of speculators before 0.8 is no longer written and not read here",
    "deepseek-v4-dspark": "its stages are DeepSeek-V4 blocks (mixture of experts, hyper-connections) inside the target",
    "gguf-other": "of GGUF drafters only dflash and eagle3 are read; give a causal LM as a Hugging Face folder",
    "nemotron-dspark": "its bonus anchor and attention sinks have no engine here",
}


def why_not_runnable(family: str) -> str:
    """The reason, for a family that no reader handles."""
    return NOT_RUNNABLE.get(family, "its format is known by name only")
