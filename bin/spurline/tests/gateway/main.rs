//! The S3 endpoint, end to end with the real binary: calls over plain HTTP, hostile clients, and S3 clients of others.

mod calls;
mod cases;
mod hostile;
#[path = "../common/installed_tool.rs"]
mod installed_tool;
#[path = "../common/python_packages.rs"]
mod python_packages;
mod rig;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/s3_clients.rs"]
mod s3_clients;
mod strangers;
mod streamer;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/world.rs"]
mod world;
