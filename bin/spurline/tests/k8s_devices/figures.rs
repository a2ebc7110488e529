//! Figures, not tests: what the device plugin costs under the device manager of the real kubelet, beside the plugin of
//! kubelet's own tests. Run by hand with an optimised program, as in BENCHMARKS.md.

use crate::rig::{KubeletRig, NodeRig, ib_config};
use spurline_rig::program::{memory_of, quantile};
use spurline_testkit::hosts;
use std::time::{Duration, Instant};

const ROUNDS: usize = 7;
const SLOTS: u32 = 400;

/// Milliseconds of each admission of a pod with one slot, until no slot is free.
fn admissions(kubelet: &mut KubeletRig, resource: &str) -> Vec<f64> {
    let pods = 0..SLOTS;
    pods.map(|pod| {
        let answer = kubelet.pod(&format!("p{pod}"), resource, 1);
        assert_eq!(answer["admitted"], true, "{answer}");
        answer["us"].as_f64().unwrap() / 1e3
    })
    .collect()
}

fn print(what: &str, mut times: Vec<f64>) {
    let [least, median, high] = [0.0, 0.5, 0.99].map(|share| quantile(&mut times, share));
    println!("{what}: shortest {least:.2} ms, median {median:.2} ms, 99th percentile {high:.2} ms of {}", times.len());
}

#[test]
#[ignore = "a measurement, by hand"]
fn figures_of_the_device_plugin() {
    let (mut advertised, mut ours, mut least) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mut node = NodeRig::new(&hosts::gb200(), &ib_config(SLOTS));
        let Some(mut kubelet) = KubeletRig::start(&node, "none") else { return };
        let begin = Instant::now();
        node.start(&[]);
        kubelet.wait_capacity("rdma/ib", (SLOTS.into(), SLOTS.into()));
        advertised.push(begin.elapsed().as_secs_f64() * 1e3);
        ours.extend(admissions(&mut kubelet, "rdma/ib"));
        std::thread::sleep(Duration::from_secs(2));
        println!("memory of the plugin with {SLOTS} pods, at rest: {}", memory_of(node.pid()));
        // The same kubelet, without any plugin of ours.
        let node = NodeRig::new(&hosts::gb200(), &ib_config(SLOTS));
        let mut kubelet = KubeletRig::start(&node, "none").unwrap();
        kubelet.ask(&format!("stub example.com/stub {SLOTS}"));
        kubelet.wait_capacity("example.com/stub", (SLOTS.into(), SLOTS.into()));
        least.extend(admissions(&mut kubelet, "example.com/stub"));
    }
    print("start of the plugin to the resource in kubelet's capacity (seen every 20 ms)", advertised);
    print(&format!("admission of a pod, {SLOTS} slots, this plugin"), ours);
    print(&format!("admission of a pod, {SLOTS} slots, the plugin of kubelet's tests"), least);
}
