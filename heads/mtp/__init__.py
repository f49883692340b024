"""The target's own layers for multi-token prediction (MTP) as a draft head."""
