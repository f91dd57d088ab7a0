"""Who holds what: files to replicas, meshes to replica groups, shards to whole tensors."""
