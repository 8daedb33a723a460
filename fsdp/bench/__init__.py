"""What training costs: this package against torch's DDP and FSDP, DeepSpeed, and no communication at all."""
