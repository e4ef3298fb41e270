"""The long campaign: real runs through real faults, and inputs by the thousand, with nothing lost."""
