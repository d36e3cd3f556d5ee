"""What a reclaim really does to a guest: on the lab's container, through real SSH and a node."""
