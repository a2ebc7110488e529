//! The S3 endpoint, end to end with the real binary: calls over plain HTTP, hostile clients, and S3 clients of others.

mod calls;
mod case_tables;
mod cases;
mod hadoop;
mod hostile;
mod key_limits;
mod rig;
mod strangers;
mod streamer;
mod untagged;
