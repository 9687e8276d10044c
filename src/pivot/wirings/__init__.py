"""What the probe recorded: which layers really reached the drafter."""
