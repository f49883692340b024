"""What a run needs, which recipe suits a target, and why acceptance is low."""
