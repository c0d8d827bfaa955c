"""What a checkpoint consists of, on disk or on the hub; torch is not imported here."""
