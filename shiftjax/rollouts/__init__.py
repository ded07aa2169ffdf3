"""An engine as a part of training: it pauses, sleeps, and takes other weights while it runs."""
