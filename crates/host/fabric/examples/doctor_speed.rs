//! How long an examination takes on a host with 16 devices of 256 full address places each, read from a folder as
//! `net doctor --from` does: `cargo run --release -p spurline-fabric --example doctor_speed`. Prints the median of 9.

use spurline_testkit::hosts;

use spurline_fabric::{DoctorOptions, HostTree, examine};
use std::time::Instant;

fn main() {
    let dir = tempfile::tempdir().unwrap();
    hosts::large().write_to(dir.path());
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let start = Instant::now();
            let found = examine(&HostTree::from_folder(dir.path()), &DoctorOptions::default());
            assert!(found.iter().all(|f| f.id != "CHECK-LEFT-OUT"), "{found:?}");
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!(
        "16 devices, 256 addresses each: {:.0} ms (from {:.0} to {:.0})",
        times[4] * 1e3,
        times[0] * 1e3,
        times[8] * 1e3
    );
}
