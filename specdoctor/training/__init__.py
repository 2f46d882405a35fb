"""The drafter tool chain: answers of the target, its hidden states, objectives, the training loop, calibration."""
