"""Execute plans on pipeline stages that are torch modules."""
