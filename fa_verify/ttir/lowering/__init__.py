"""From IR to closures, and what is learnt from the IR alone before anything runs."""
