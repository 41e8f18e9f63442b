"""The controller of a job: finds its agents, shows the job as a whole, and brings escalations to all of them."""
