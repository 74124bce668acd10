"""How ranks find each other, and what carries their bytes."""
