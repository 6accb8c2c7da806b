"""The cheapest policy that meets a target, found on a sample of questions: `pic tune`."""
