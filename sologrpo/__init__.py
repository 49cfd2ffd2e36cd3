"""SoloGRPO: GRPO training on one GPU, on top of TRL."""
