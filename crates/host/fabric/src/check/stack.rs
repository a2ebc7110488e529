//! Checks of the software between hardware and program: driver, modules, libraries, device files, namespaces.

use super::ports::{describe_states, layer_word};
use crate::change::HostChange;
use crate::device::{LinkLayer, PortState, RdmaDevice};
use crate::doctor::CheckInput;
use crate::finding::{HostFinding, Severity, id};

const IPC_LOCK: u32 = 14;

/// Runs the checks.
pub fn check_stack(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    check_devices(case, found);
    check_drivers(case, found);
    check_modules(case, found);
    check_libraries(case, found);
    check_device_files(case, found);
    check_namespaces(case, found);
    check_device_kinds(case, found);
}

fn check_devices(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    for name in &case.options.for_rdma {
        let evidence = match case.host.interface(name) {
            None => format!("/sys/class/net/{name} is not there"),
            Some(i) if case.host.ports_of(i).is_empty() => {
                format!(
                    "no port below /sys/class/infiniband names {name} in gid_attrs/ndevs, and none shares its PCI function"
                )
            }
            Some(_) => continue,
        };
        let known: Vec<&str> = case.rdma_interfaces().filter(|i| i.rdma.is_some()).map(|i| i.name.as_str()).collect();
        let remedy = match known.as_slice() {
            [] => "without RDMA hardware: leave --rdma-network out, TCP carries the data; for trying out, `rdma link add rxe0 type rxe netdev IF`".to_owned(),
            known => format!("name one of {}", known.join(", ")),
        };
        found.push(HostFinding::new(id::NO_RDMA_DEVICE, Severity::Error, name, evidence, remedy));
    }
    let is_missing = case.host.devices.is_empty();
    let remedy = "TCP carries the data; with RDMA hardware in the host see DRIVER-MISSING and KERNEL-MODULE";
    if let Some(wanted) = case.options.expect.filter(|_| case.all_ports().next().is_none()) {
        let what = if is_missing { "is empty or not there" } else { "shows no port" };
        let evidence = format!("/sys/class/infiniband {what}, but --expect requires {}", layer_word(wanted));
        found.push(HostFinding::new(id::NO_RDMA_DEVICE, Severity::Error, case.name_of("host"), evidence, remedy));
    } else if is_missing && case.options.for_rdma.is_empty() {
        let evidence = "/sys/class/infiniband is empty or not there";
        found.push(HostFinding::new(id::NO_RDMA_DEVICE, Severity::Info, case.name_of("host"), evidence, remedy));
    }
}

fn check_drivers(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    for pci in &case.machine.functions {
        let Some(address) = &pci.address else { continue };
        let has_device =
            case.host.devices.iter().any(|d| d.pci.as_ref().and_then(|p| p.address.as_ref()) == Some(address));
        // The second function of a bond has no separate device, and a virtual function may be passed to a guest.
        let is_member = case
            .host
            .interfaces
            .iter()
            .any(|i| i.master.is_some() && i.pci.as_ref().and_then(|p| p.address.as_ref()) == Some(address));
        let given_away = matches!(pci.driver.as_deref(), Some("vfio-pci" | "uio_pci_generic" | "igb_uio"));
        // So may a pod or a guest have, or get later, a virtual function whose physical function is here.
        if has_device || is_member || given_away || pci.physical.is_some() {
            continue;
        }
        let name = pci.known_model.unwrap_or("InfiniBand hardware");
        let subject = format!("{address} ({name}, {})", pci.id_text().unwrap_or_default());
        let model = pci.model();
        let module = model.map(|m| m.rdma_module);
        let loaded = module.and_then(|m| case.machine.has_module(m));
        // An Ethernet card whose RDMA function is unused is no fault.
        let is_ib = pci.driver.is_none() || model.is_some_and(|m| m.connected_ipoib);
        let severity = if is_ib || !case.options.for_rdma.is_empty() { Severity::Error } else { Severity::Info };
        let driver =
            pci.driver.as_deref().map_or("no driver is bound to it".to_owned(), |d| format!("{d} is bound to it"));
        let evidence =
            format!("/sys/bus/pci/devices/{address}: {driver}, and no device of it is in /sys/class/infiniband");
        let finding = |remedy: &str| HostFinding::new(id::DRIVER_MISSING, severity, &subject, &evidence, remedy);
        found.push(match (module, loaded) {
            (Some(module), Some(false) | None) => finding("if there is no such module, install the kernel's extra modules package (linux-modules-extra-$(uname -r), kernel-modules-extra) or the vendor's drivers")
                .with_changes([HostChange::Module { name: module.to_owned() }]),
            _ => finding("dmesg | grep -i -e mlx -e infiniband -e rdma shows why the driver failed; old cards need a driver that newer distributions no longer build"),
        });
    }
}

fn check_modules(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    if !case.wants_rdma() {
        return;
    }
    let names = case.machine.char_devices.as_deref().unwrap_or_default();
    let has_char = |prefix: &str| names.iter().any(|n| n.starts_with(prefix));
    let any_ib = case.all_ports().any(|(_, p)| p.link_layer == LinkLayer::InfiniBand);
    let needed = [
        ("ib_uverbs", true, has_char("uverbs"), "programs can't open RDMA devices without it", Severity::Error),
        ("rdma_ucm", true, has_char("rdma_cm"), "programs can't connect by IP address without it", Severity::Error),
        (
            "ib_ipoib",
            any_ib,
            case.host.interfaces.iter().any(|i| i.is_ipoib()),
            "no IP over InfiniBand without it, and rdma_cm needs IP addresses",
            Severity::Error,
        ),
    ];
    for (module, wanted, seen, why, severity) in needed {
        if wanted && !seen && case.machine.has_module(module) == Some(false) && !case.host.devices.is_empty() {
            let evidence = format!("{module} is neither in /proc/modules nor built in: {why}");
            let remedy = format!("at every start: echo {module} > /etc/modules-load.d/{module}.conf");
            found.push(
                HostFinding::new(id::KERNEL_MODULE, severity, module, evidence, remedy)
                    .with_changes([HostChange::Module { name: module.to_owned() }]),
            );
        }
    }
}

/// The prefix of the file name of a device's provider.
fn provider_library(device: &RdmaDevice) -> Option<&'static str> {
    let driver = device.pci.as_ref().and_then(|p| p.driver.as_deref());
    let word = driver.unwrap_or(&device.name);
    let known = [
        ("mlx5", "libmlx5"),
        ("mlx4", "libmlx4"),
        ("ib_mthca", "libmthca"),
        ("mthca", "libmthca"),
        ("ice", "libirdma"),
        ("i40e", "libirdma"),
        ("irdma", "libirdma"),
        ("bnxt", "libbnxt_re"),
        ("efa", "libefa"),
        ("erdma", "liberdma"),
        ("rxe", "librxe"),
        ("siw", "libsiw"),
        ("hns", "libhns"),
        ("qed", "libqedr"),
        ("cxgb4", "libcxgb4"),
        ("mana", "libmana"),
        ("hfi1", "libhfi1verbs"),
        ("ib_qib", "libipathverbs"),
    ];
    known.iter().find(|(start, _)| word.starts_with(start)).map(|(_, library)| *library)
}

fn check_libraries(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    if !case.wants_rdma() || !case.machine.has_libraries {
        return;
    }
    let severity = if case.options.for_rdma.is_empty() { Severity::Warning } else { Severity::Error };
    let ofed =
        case.machine.ofed.as_ref().map_or("no OFED either".to_owned(), |v| format!("the OFED's modules are {v}"));
    for (library, package) in [("libibverbs.so.1", "libibverbs1 ibverbs-providers"), ("librdmacm.so.1", "librdmacm1")] {
        if !case.machine.libraries.contains_key(library) {
            found.push(HostFinding::new(
                id::RDMA_LIBRARY,
                severity,
                library,
                format!("in none of the library directories (/usr/lib64, /usr/lib/x86_64-linux-gnu, …); {ofed}"),
                format!("apt-get install {package} (Debian, Ubuntu), dnf install libibverbs librdmacm (RHEL, Rocky)"),
            ));
        }
    }
    let Some(providers) = &case.machine.providers else { return };
    let mut said: Vec<&str> = Vec::new();
    for device in &case.host.devices {
        let Some(library) = provider_library(device).filter(|l| !said.contains(l)) else { continue };
        if !providers.iter().any(|p| p.starts_with(library)) {
            said.push(library);
            // Debian packages librxe and libmthca with the others; EFA's and eRDMA's may be the vendor's.
            found.push(HostFinding::new(
                id::RDMA_LIBRARY,
                severity,
                format!("{library} for {}", device.name),
                format!("no file libibverbs/{library}-rdmav*.so beside libibverbs"),
                "apt-get install ibverbs-providers (Debian, Ubuntu), dnf install libibverbs (RHEL, Rocky), or the vendor's package".to_owned(),
            ));
        }
    }
}

fn check_device_files(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    if case.host.devices.is_empty() {
        return;
    }
    let Some(names) = &case.machine.char_devices else { return };
    let verbs = names.iter().any(|n| n.starts_with("uverbs"));
    if let Some(why) = &case.machine.container {
        if !verbs {
            found.push(HostFinding::new(
                id::CONTAINER_DEVICES,
                Severity::Error,
                case.name_of("container"),
                format!("no /dev/infiniband/uverbs* although /sys/class/infiniband has devices; {why}"),
                "Docker: --device /dev/infiniband --cap-add IPC_LOCK; Kubernetes: request a resource of an RDMA device plugin (`spurline k8s explain -f pod.yaml`)",
            ));
        }
        if case.machine.capabilities.is_some_and(|c| c >> IPC_LOCK & 1 == 0)
            && case.machine.memlock.is_none_or(|(soft, _)| soft < u64::MAX)
        {
            found.push(HostFinding::new(
                id::CONTAINER_IPC_LOCK,
                Severity::Error,
                case.name_of("container"),
                format!("/proc/self/status: CapEff {:016x} has no CAP_IPC_LOCK, and locked memory is limited", case.machine.capabilities.unwrap_or_default()),
                "Docker: --cap-add IPC_LOCK, or --ulimit memlock=-1; Kubernetes: securityContext.capabilities.add: [\"IPC_LOCK\"]",
            ));
        }
    } else if !verbs && case.machine.has_module("ib_uverbs") != Some(false) {
        found.push(HostFinding::new(
            id::UVERBS_ACCESS,
            Severity::Error,
            "/dev/infiniband",
            "no /dev/infiniband/uverbs* although /sys/class/infiniband has devices",
            "udevadm trigger --subsystem-match=infiniband_verbs; without udev, make the nodes by the numbers in /sys/class/infiniband_verbs/*/dev",
        ));
    }
    check_missing_nodes(case, names, found);
    if !case.machine.denied.is_empty() {
        found.push(HostFinding::new(
            id::UVERBS_ACCESS,
            Severity::Warning,
            case.machine.denied.join(", "),
            "this user may not read and write these files in /dev/infiniband",
            "rdma-core's udev rules give them mode 0666; by hand: chmod 0666 /dev/infiniband/uverbs* /dev/infiniband/rdma_cm",
        ));
    }
}

/// Devices whose file for verbs is missing although others have theirs.
fn check_missing_nodes(case: &CheckInput<'_>, names: &[String], found: &mut Vec<HostFinding>) {
    let (present, missing): (Vec<&RdmaDevice>, Vec<&RdmaDevice>) =
        case.host.devices.iter().filter(|device| !device.is_bare()).partition(|device| {
            let node = case.machine.verbs_nodes.get(&device.name);
            node.is_some_and(|node| names.contains(node))
        });
    if present.is_empty() || missing.is_empty() {
        return;
    }
    let words: Vec<String> = missing
        .iter()
        .map(|device| {
            let node = case.machine.verbs_nodes.get(&device.name);
            node.map_or(device.name.clone(), |node| format!("{} ({node})", device.name))
        })
        .collect();
    let evidence = format!(
        "{} of {} devices have no file in /dev/infiniband: {}",
        missing.len(),
        missing.len() + present.len(),
        words.join(", ")
    );
    let interfaces = missing.iter().flat_map(|device| &device.ports).flat_map(|port| &port.netdevs);
    if case.machine.container.is_some() {
        found.push(HostFinding::new(
            id::CONTAINER_DEVICES,
            case.severity_for(interfaces, Severity::Info),
            case.name_of("container"),
            evidence,
            "right where the container is meant to have the others only; else Docker: --device /dev/infiniband; Kubernetes: request more of the resource",
        ));
    } else {
        found.push(HostFinding::new(
            id::UVERBS_ACCESS,
            case.severity_for(interfaces, Severity::Warning),
            "/dev/infiniband",
            evidence,
            "in a container, give it those files or leave those devices alone; on a host: udevadm trigger --subsystem-match=infiniband_verbs",
        ));
    }
}

fn check_namespaces(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    if case.host.rdma_exclusive == Some(true) {
        let severity = if case.host.devices.is_empty() { Severity::Warning } else { Severity::Info };
        found.push(HostFinding::new(
            id::RDMA_NAMESPACE,
            severity,
            "RDMA namespace mode",
            "netlink (rdma system show): netns exclusive: a device belongs to one network namespace and is not seen in others",
            "for pods that share devices: rdma system set netns shared, before any namespace is made; or move devices: rdma dev set mlx5_0 netns NAME",
        ));
    }
}

/// Software devices, and devices without the operations that RDMA data needs.
fn check_device_kinds(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    for device in &case.host.devices {
        if device.is_efa() {
            found.push(HostFinding::new(
                id::NO_RELIABLE_CONNECTION,
                case.severity_for(device.ports.iter().flat_map(|p| &p.netdevs), Severity::Info),
                &device.name,
                format!("/sys/class/infiniband/{}: an Elastic Fabric Adapter has datagrams of its own kind and no reliable connections", device.name),
                "TCP carries the data: leave --rdma-network out",
            ));
        }
        if device.pci.is_none()
            && (device.parent.is_some() || device.name.starts_with("rxe") || device.name.starts_with("siw"))
        {
            let on = device.parent.as_deref().unwrap_or("an interface");
            found.push(HostFinding::new(
                id::SOFT_RDMA,
                Severity::Info,
                &device.name,
                format!("no PCI function behind it: RDMA in software on {on}"),
                "suitable for trials and tests; TCP is faster on the same interface",
            ));
        }
        // Other kinds of network use no GUID: EFA and iWARP have none by design, and RoCE derives addresses from IP addresses.
        let infiniband = device.ports.iter().find(|port| port.link_layer == LinkLayer::InfiniBand);
        if let Some(port) = infiniband.filter(|_| device.has_zero_guid() && device.pci.is_some()) {
            let is_down = port.state != PortState::Active;
            let states = if is_down { format!("; {}", describe_states(device, port)) } else { String::new() };
            let severity = if is_down && case.is_used(port) { Severity::Error } else { Severity::Warning };
            found.push(HostFinding::new(
                id::GUID_ZERO,
                case.severity_for(device.ports.iter().flat_map(|p| &p.netdevs), severity),
                &device.name,
                format!("/sys/class/infiniband/{}/node_guid is zero: no subnet manager makes a virtual function without a GUID active{states}", device.name),
                "on the host of the physical function: ip link set PF vf N node_guid … and port_guid …, then echo Follow > /sys/class/infiniband/PF/device/sriov/N/policy, and unbind and bind the function",
            ));
        }
    }
}
