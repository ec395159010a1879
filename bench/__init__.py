"""What is measured: each module is a command that prints figures side by side, medians of several runs."""
