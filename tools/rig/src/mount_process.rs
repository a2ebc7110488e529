//! The process of a mount with `--recover`: which it is, its end, and the next one.

use crate::world::*;
use rustix::process::Signal;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Five processes in a row that end within a second of their service are a crash loop.
pub const SERVICE_BETWEEN_ENDS: Duration = Duration::from_millis(1500);

/// The process that serves the mount, and how many have before.
pub fn server(world: &World, at: &Path) -> Option<(u32, u64)> {
    let out = world.run(&["status", "--json", at.to_str().unwrap()]);
    let status: serde_json::Value = serde_json::from_slice(&out.stdout).ok()?;
    Some((status["pid"].as_u64()? as u32, status["keeper"]["restarts"].as_u64()?))
}

/// Ends the process that serves the mount; returns the number of processes before the next.
pub fn end_server(world: &World, at: &Path, signal: Signal) -> u64 {
    let (pid, restarts) = server(world, at).expect("a process answers");
    end_process(pid, signal);
    restarts + 1
}

fn end_process(pid: u32, signal: Signal) {
    eventually("the process ends", || {
        // Again: the first SIGSEGV that is no fault of a stack only restores the signal's default.
        send(pid, signal);
        !Path::new(&format!("/proc/{pid}")).exists()
    });
}

pub fn wait_for_server(world: &World, at: &Path, restarts: u64) {
    eventually("another process serves the mount", || server(world, at).is_some_and(|(_, now)| now >= restarts));
}

/// Kills the process that serves the mount again and again until the program ends, with success; returns how often.
pub fn kill_servers_beside(world: &World, at: &Path, program: &mut Command) -> u64 {
    let log_path = world.log_path("beside");
    let log = File::create(&log_path).unwrap();
    let mut running = program.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
    let mut ends = 0;
    loop {
        std::thread::sleep(SERVICE_BETWEEN_ENDS);
        if let Some(status) = running.try_wait().unwrap() {
            assert!(status.success(), "{}", fs::read_to_string(log_path).unwrap());
            return ends;
        }
        ends = end_server(world, at, Signal::KILL);
        wait_for_server(world, at, ends);
    }
}

/// Unmounts; the keeper ends with the mount.
pub fn unmount_kept(world: &World, mut mount: Mount) {
    let out = world.run(&["umount", mount.at.to_str().unwrap()]);
    assert!(out.status.success(), "{out:?}");
    assert!(mount.process_mut().wait().success(), "the keeper ends with the mount");
}
