//! Registries with real servers: the coordinator, etcd, DNS.

mod common;
mod coordinator;
mod dns;
mod etcd;
mod etcd_jobs;
mod trust;
