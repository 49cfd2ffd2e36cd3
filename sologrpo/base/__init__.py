"""What all rooms share: files, errors, logs, the console and what is known of the machine."""
