//! An examination: the facts of a host, what was asked of it, and all checks over them in one order. It reads no file
//! and judges nothing itself.

use crate::check;
use crate::device::{Device, LinkLayer, Port};
use crate::finding::{Finding, Severity, id};
use crate::host::Host;
use crate::interface::Interface;
use crate::machine::Machine;
use crate::tree::Tree;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// What an examination is told.
#[derive(Debug, Clone, Default)]
pub struct Ask {
    /// Interfaces that have to carry RDMA: what is in their way is an error.
    pub for_rdma: Vec<String>,
    /// The link layer every port should have.
    pub expect: Option<LinkLayer>,
    /// The other end, to compare with.
    pub peer: Option<Host>,
    /// Which interfaces carried bytes to that end when it was tried.
    pub trials: Vec<Trial>,
    /// Whether the subnet manager of a port's fabric answered, by device and port; none where nobody asked.
    pub subnet_manager: BTreeMap<(String, u32), SmAnswer>,
    /// Why interfaces of `for_rdma` can't be rails, by whoever would use them.
    pub obstacles: Vec<Obstacle>,
}

/// Why an interface can't be a rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// The interface.
    pub interface: String,
    /// Its port, `mlx5_0/1`, where that is what is wrong.
    pub port: Option<String>,
    /// The finding it is.
    pub id: &'static str,
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

/// Bytes sent to an address of the peer, to see which interfaces carry them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    /// The interface of this host they were sent from, by its address.
    pub interface: String,
    /// The peer's address.
    pub to: IpAddr,
    /// How many.
    pub bytes: u64,
    /// The interfaces that carried them where these are others than those with the addresses, here and there; or why it
    /// could not be tried.
    pub carried: Result<[Option<String>; 2], String>,
}

/// What became of a question to a subnet manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SmAnswer {
    /// It answered.
    Alive,
    /// It did not, although the question could be sent; the words of the library.
    Silent(String),
    /// The question could not be sent, and why.
    NotAsked(String),
}

/// All that the checks look at.
#[derive(Debug)]
pub struct Case<'a> {
    /// Fabric.
    pub host: &'a Host,
    /// The rest of the host.
    pub machine: &'a Machine,
    /// What was asked.
    pub ask: &'a Ask,
}

/// Examines a host.
pub fn examine(tree: &Tree, ask: &Ask) -> Vec<Finding> {
    let host = Host::read(tree);
    let addresses: Vec<String> = host.devices.iter().filter_map(|d| d.pci.as_ref()?.address.clone()).collect();
    let interfaces: Vec<String> =
        host.interfaces.iter().filter(|i| !i.addresses.is_empty()).map(|i| i.name.clone()).collect();
    let machine = Machine::read(tree, &addresses, &interfaces);
    let case = Case { host: &host, machine: &machine, ask };
    let mut found = Vec::new();
    check::stack::run(&case, &mut found);
    check::ports::run(&case, &mut found);
    check::roce::run(&case, &mut found);
    check::ip::run(&case, &mut found);
    check::subnets::run(&case, &mut found);
    check::limits::run(&case, &mut found);
    check::placement::run(&case, &mut found);
    check::peer::run(&case, &mut found);
    obstacles(&case, &mut found);
    left_out(tree, &case, &mut found);
    // The worst first; within that, in the order of the checks.
    found.sort_by_key(|f| f.severity);
    found
}

/// What a node or a mount would refuse, where no check has said it in its own words.
fn obstacles(case: &Case<'_>, found: &mut Vec<Finding>) {
    for o in &case.ask.obstacles {
        let names =
            |f: &Finding| f.subject.contains(&o.interface) || o.port.as_ref().is_some_and(|p| f.subject.contains(p));
        let about = |f: &Finding| f.severity == Severity::Error && names(f);
        if !found.iter().any(about) {
            found.push(Finding::new(o.id, Severity::Error, &o.interface, &o.what, &o.remedy));
        }
    }
}

fn left_out(tree: &Tree, case: &Case<'_>, found: &mut Vec<Finding>) {
    let mut all = case.host.left_out.clone();
    all.extend(tree.left_out());
    all.sort();
    all.dedup();
    let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for left in all {
        reasons.entry(left.why).or_default().push(left.path);
    }
    for (why, paths) in reasons {
        let more = if paths.len() > 3 { format!(" and {} more", paths.len() - 3) } else { String::new() };
        let evidence = format!("{}{more}: {why}", paths.iter().take(3).cloned().collect::<Vec<_>>().join(", "));
        let remedy = if why.contains("permission") {
            "run it as root to look at these too"
        } else {
            "see dmesg: hardware that does not answer"
        };
        found.push(Finding::new(id::CHECK_LEFT_OUT, Severity::Info, "files that could not be read", evidence, remedy));
    }
    let mut silent = |what: &str, why: String, remedy: &str| {
        found.push(Finding::new(id::CHECK_LEFT_OUT, Severity::Info, what, why, remedy));
    };
    if let Some(first) = case.machine.config_cut.first() {
        silent(
            "relaxed ordering",
            format!("/sys/bus/pci/devices/{first}/config shows only its first 64 bytes"),
            "run it as root",
        );
    }
    if case.machine.modules.is_none() && !case.host.devices.is_empty() {
        silent(
            "kernel modules",
            "neither /proc/modules nor /sys/module is there".into(),
            "collect on the host with `net collect`",
        );
    }
    for trial in &case.ask.trials {
        if let Err(why) = &trial.carried {
            silent(
                &trial.interface,
                format!("which interface carries packets to {} could not be tried: {why}", trial.to),
                "on that host: spurline net serve, without --bind; until then the routing table is believed",
            );
        }
    }
    let mut said: Vec<&String> = Vec::new();
    for ((device, port), answer) in &case.ask.subnet_manager {
        if let SmAnswer::NotAsked(why) = answer
            && !said.contains(&why)
        {
            said.push(why);
            silent(
                "subnet manager",
                format!("{device}/{port}: {why}"),
                "without it, an SM LID is believed although its owner may be gone",
            );
        }
    }
}

impl<'a> Case<'a> {
    /// Every port with its device.
    pub fn ports(&self) -> impl Iterator<Item = (&'a Device, &'a Port)> {
        self.host.devices.iter().flat_map(|d| d.ports.iter().map(move |p| (d, p)))
    }

    /// Whether somebody wants RDMA here: it is there, or was asked for.
    pub fn wants_rdma(&self) -> bool {
        !self.host.devices.is_empty() || !self.ask.for_rdma.is_empty()
    }

    /// Whether a name was given by --for-rdma, itself or an interface that stands on it.
    pub fn is_wanted(&self, name: &str) -> bool {
        self.ask.for_rdma.iter().any(|wanted| {
            wanted == name
                || self.host.interface(wanted).is_some_and(|i| self.host.physical(i).iter().any(|p| p.name == name))
        })
    }

    /// Whether a port is one that has to work: named by --for-rdma, or with an address on one of its interfaces.
    pub fn is_used(&self, port: &Port) -> bool {
        port.netdevs.iter().any(|n| {
            self.is_wanted(n) || self.host.interface(n).is_some_and(|i| !i.addresses.is_empty() || i.master.is_some())
        })
    }

    /// An error where --for-rdma names one of the interfaces, else what is given.
    pub fn severity<'n>(&self, names: impl IntoIterator<Item = &'n String>, otherwise: Severity) -> Severity {
        if names.into_iter().any(|n| self.is_wanted(n)) { Severity::Error } else { otherwise }
    }

    /// Interfaces whose traffic can be RDMA, or that carry IP over InfiniBand, or that --for-rdma names.
    pub fn rdma_interfaces(&self) -> impl Iterator<Item = &'a Interface> {
        let host = self.host;
        let wanted = &self.ask.for_rdma;
        host.interfaces.iter().filter(move |i| {
            !i.is_loopback() && (i.is_ipoib() || wanted.contains(&i.name) || !host.ports_of(i).is_empty())
        })
    }
}

/// A port as a person names it: `mlx5_0/1`.
pub fn port_name(device: &Device, port: &Port) -> String {
    format!("{}/{}", device.name, port.number)
}

/// The sysfs directory of a port.
pub fn port_path(device: &Device, port: &Port) -> String {
    format!("/sys/class/infiniband/{}/ports/{}", device.name, port.number)
}
