"""Watch depth while a model trains: measure a small probe batch now and then, log it, and raise alarms."""
