ANSWER = "imported on first use"
