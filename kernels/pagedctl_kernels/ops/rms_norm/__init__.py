"""RMSNorm with the residual sum."""
