//! Figures, not tests: how long a volume takes until a pod can read it, and the memory of the driver. Run by hand with an
//! optimised program, as in BENCHMARKS.md.

use crate::test_all::volumes::NodeRig;
use spurline_rig::driver::{DriverRig, pair};
use spurline_rig::program::{memory_of, quantile};
use std::collections::HashMap;
use std::time::Instant;

const ROUNDS: usize = 15;

/// Times of one kind of volume in milliseconds.
#[derive(Default)]
struct VolumeTimes {
    stage: Vec<f64>,
    publish: Vec<f64>,
    inline: Vec<f64>,
    unstage: Vec<f64>,
}

fn milliseconds<T>(work: impl FnOnce() -> T) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_secs_f64() * 1e3
}

/// Volumes one after the other: of a claim, and inline. Each time ends with the first bytes that were read.
fn measure(driver: &DriverRig, attributes: &HashMap<String, String>) -> VolumeTimes {
    let mut times = VolumeTimes::default();
    let inline = attributes.clone().into_iter().chain([pair(("csi.storage.k8s.io/ephemeral", "true"))]).collect();
    for round in 0..ROUNDS {
        times.stage.push(milliseconds(|| driver.stage("pv", attributes).unwrap()));
        times.publish.push(milliseconds(|| {
            driver.publish("pv", "a", attributes).unwrap();
            driver.read("a").unwrap();
        }));
        driver.unpublish("pv", "a").unwrap();
        times.unstage.push(milliseconds(|| driver.unstage("pv").unwrap()));
        let id = format!("csi-{round}");
        times.inline.push(milliseconds(|| {
            driver.publish(&id, "b", &inline).unwrap();
            driver.read("b").unwrap();
        }));
        driver.unpublish(&id, "b").unwrap();
    }
    times
}

fn print(kind: &str, mut times: VolumeTimes) {
    for (what, times) in [
        ("NodeStageVolume: the mount process is started and answers", &mut times.stage),
        ("NodePublishVolume of a staged volume, to the first bytes read", &mut times.publish),
        ("NodePublishVolume of an inline volume, to the first bytes read", &mut times.inline),
        ("NodeUnstageVolume", &mut times.unstage),
    ] {
        let [least, median, most] = [0.0, 0.5, 1.0].map(|share| quantile(times, share));
        println!("{kind}: {what}: shortest {least:.1} ms, median {median:.1} ms, longest {most:.1} ms");
    }
}

#[test]
#[ignore = "a measurement, by hand"]
fn figures_of_volumes() {
    let Some(host) = DriverRig::new() else { return };
    println!("memory of the driver without volumes: {}", memory_of(host.pid()));
    print("processes of the host", measure(&host, &host.attributes()));
    println!("memory of the driver after {} volumes: {}", 2 * ROUNDS, memory_of(host.pid()));
    let attributes = host.attributes();
    for volume in 0..10 {
        host.stage(&format!("pv-{volume}"), &attributes).unwrap();
        host.publish(&format!("pv-{volume}"), &format!("p{volume}"), &attributes).unwrap();
    }
    std::thread::sleep(std::time::Duration::from_secs(2));
    println!("memory of the driver with 10 volumes: {}", memory_of(host.pid()));
    drop(host);
    let Some(node) = NodeRig::new("node-figures") else { return };
    let (_, attributes) = node.user_pod("figures-a");
    print("mount pods at a real API server", measure(&node.driver, &attributes));
    println!("memory of the driver with mount pods: {}", memory_of(node.driver.pid()));
}
