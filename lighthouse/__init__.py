"""Who is a member: names, the pure membership machine, its log and the gRPC service around it."""
