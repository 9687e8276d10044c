"""The drafter contract: which layers reach a drafter, and whether it fits."""
