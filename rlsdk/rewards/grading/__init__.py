"""The processes that call reward functions: started, confined, fed, timed and replaced."""
