//! The main job end to end with the real binary: mounts and nodes as processes, faults from outside.
//! One test program, so that linking stays cheap; `writable` has the writable mounts.

mod abuse;
mod automount;
mod cluster;
mod copies;
mod default_cache;
mod disks;
mod documents;
mod drain;
mod faults;
mod group;
mod hosts;
mod jobs;
mod load;
mod lone;
mod members;
mod networks;
mod outage;
mod probe;
mod programs;
mod recover;
mod recover_writes;
mod registries;
mod remote;
mod rules;
mod settings;
mod trust;
mod unmounts;
