"""From a network to a shallower one, and how far apart the two can be: proved from above, attacked from below."""
