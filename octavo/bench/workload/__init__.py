"""What is asked, and when: data sets, traces, arrival processes."""
