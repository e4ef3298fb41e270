"""What a run tells: events for views, trackers, sample logs, requests to stop."""
