"""What is asked, and when: data sets, traces, arrival processes; of a server, or of a simulator."""
