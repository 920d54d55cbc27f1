"""What suits a model when nobody says otherwise, each with a reason: parsers of its answers, sampling by mode."""
