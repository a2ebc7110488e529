//! Hosts on one bridge, each a network namespace of its own.

use crate::world::{Hosts, ip, is_root, skip};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
/// Hosts on one bridge, each a network namespace with one interface; taken away when dropped.
pub struct Lan {
    id: String,
    hosts: usize,
}

impl Lan {
    pub fn new(hosts: usize) -> Option<Lan> {
        if !is_root() {
            skip("netns", "network namespaces need root");
            return None;
        }
        // Tests of one program run side by side.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = format!("spc{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let lan = Lan { id, hosts };
        let switch = lan.switch();
        let mut steps = vec![format!("netns add {switch}"), format!("-n {switch} link add br0 type bridge")];
        steps.push(format!("-n {switch} link set br0 up"));
        for n in 0..hosts {
            let (host, at) = (lan.host(n), Lan::ip(n));
            steps.extend([
                format!("netns add {host}"),
                format!("link add p{n} netns {switch} type veth peer name lan0 netns {host}"),
                format!("-n {switch} link set p{n} master br0 up"),
                format!("-n {host} addr add {at}/24 dev lan0"),
                format!("-n {host} link set lan0 up"),
                format!("-n {host} link set lo up"),
            ]);
        }
        for step in steps {
            if let Err(why) = ip(&step) {
                skip("netns", &why);
                return None;
            }
        }
        Some(lan)
    }
    fn switch(&self) -> String {
        format!("{}s", self.id)
    }
    fn host(&self, n: usize) -> String {
        format!("{}h{n}", self.id)
    }
    pub fn ip(n: usize) -> String {
        format!("10.214.7.{}", n + 1)
    }
    /// The command as a process of a host.
    pub fn on(&self, n: usize, command: &Command) -> Command {
        Hosts::on(&self.host(n), command)
    }
    /// Pulls a host's cable out, or plugs it in.
    pub fn cable(&self, n: usize, plugged: bool) {
        ip(&format!("-n {} link set p{n} {}", self.switch(), if plugged { "up" } else { "down" })).unwrap();
    }
    fn in_switch(&self, words: &[&str]) -> bool {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.switch()]).args(words).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
    /// Drops part of a host's packets and delays the others: by netem, or where the kernel has none, by nft and a
    /// narrow link with a long queue.
    pub fn spoil(&self, n: usize) {
        let port = format!("p{n}");
        let netem = ["tc", "qdisc", "add", "dev", &port, "root", "netem", "delay", "5ms", "2ms", "loss", "2%"];
        if self.in_switch(&netem) {
            return println!("loss and delay by netem");
        }
        let hook =
            format!("add chain netdev lossy {port} {{ type filter hook ingress device \"{port}\" priority 0 ; }}");
        let rule = format!("add rule netdev lossy {port} numgen random mod 100 < 2 drop");
        for words in ["add table netdev lossy", &hook, &rule] {
            assert!(self.in_switch(&["nft", words]), "nft {words}");
        }
        let queue =
            ["tc", "qdisc", "add", "dev", &port, "root", "tbf", "rate", "200mbit", "burst", "64k", "latency", "100ms"];
        assert!(self.in_switch(&queue), "{queue:?}");
        println!("this kernel has no netem: loss by nft, delay by a link of 200 Mbit/s with a queue of 100 ms");
    }
    pub fn mend(&self, n: usize) {
        self.in_switch(&["nft", "delete table netdev lossy"]);
        assert!(self.in_switch(&["tc", "qdisc", "del", "dev", &format!("p{n}"), "root"]));
    }
    /// Lets nothing through from one host to another, or all again; the other way stays open.
    pub fn one_way(&self, from: usize, to: usize, shut: bool) {
        if shut {
            let hook =
                format!("add chain netdev half x {{ type filter hook ingress device \"p{from}\" priority 0 ; }}");
            let rule = format!("add rule netdev half x ip daddr {} drop", Lan::ip(to));
            for words in ["add table netdev half", &hook, &rule] {
                assert!(self.in_switch(&["nft", words]), "nft {words}");
            }
        } else {
            assert!(self.in_switch(&["nft", "delete table netdev half"]));
        }
    }
    /// The result of `make`, whose sockets belong to a host.
    pub fn inside<T: Send>(&self, n: usize, make: impl FnOnce() -> T + Send) -> T {
        let space = File::open(format!("/run/netns/{}", self.host(n))).unwrap();
        std::thread::scope(|scope| {
            let work = scope.spawn(move || {
                move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                make()
            });
            work.join().unwrap()
        })
    }
}

impl Drop for Lan {
    fn drop(&mut self) {
        for host in (0..self.hosts).map(|n| self.host(n)).chain([self.switch()]) {
            let _ = Command::new("ip").args(["netns", "del", &host]).output();
        }
    }
}
