//! Trees like those of real machines, and what the interfaces in them are resolved to.

use spurline_fabric::HostTree;
use spurline_proto::RailLink;
use spurline_rails::{HostAddress, LocalRail, MemlockLimit, UnusableRail, check_memlock, resolve_rails};
use spurline_testkit::hosts;
use tempfile::TempDir;

/// A machine's files and addresses.
struct Machine {
    sys: TempDir,
    addresses: Vec<HostAddress>,
}

struct Device<'a> {
    name: &'a str,
    node_type: &'a str,
    link_layer: &'a str,
    rate: &'a str,
    numa: &'a str,
}

const CONNECTX: Device<'_> =
    Device { name: "mlx5_0", node_type: "1: CA", link_layer: "Ethernet", rate: "100 Gb/sec (4X EDR)", numa: "1" };

impl Machine {
    fn new() -> Self {
        let machine = Machine { sys: tempfile::tempdir().unwrap(), addresses: Vec::new() };
        machine.put("class/net/lo/type", "772");
        machine
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.sys.path().join("sys").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{text}\n")).unwrap();
    }

    fn netdev(&mut self, name: &str, addresses: &[(&str, u8)]) {
        self.put(&format!("class/net/{name}/operstate"), "up");
        self.put(&format!("class/net/{name}/type"), "1");
        for (ip, prefix_len) in addresses {
            let ip = ip.parse().unwrap();
            self.addresses.push(HostAddress { interface: name.to_owned(), ip, prefix_len: *prefix_len });
        }
    }

    fn device(&self, d: &Device<'_>, port: u32) {
        let base = format!("class/infiniband/{}", d.name);
        self.put(&format!("{base}/node_type"), d.node_type);
        if !d.numa.is_empty() {
            self.put(&format!("{base}/device/uevent"), "PCI_SLOT_NAME=0000:17:00.0");
            self.put(&format!("{base}/device/numa_node"), d.numa);
        }
        for (name, text) in
            [("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("link_layer", d.link_layer), ("rate", d.rate)]
        {
            self.put(&format!("{base}/ports/{port}/{name}"), text);
        }
    }

    fn gid(&self, device: &str, port: u32, index: u32, gid: &str, kind: &str, netdev: &str) {
        let base = format!("class/infiniband/{device}/ports/{port}");
        self.put(&format!("{base}/gids/{index}"), gid);
        if !kind.is_empty() {
            self.put(&format!("{base}/gid_attrs/types/{index}"), kind);
        }
        if !netdev.is_empty() {
            self.put(&format!("{base}/gid_attrs/ndevs/{index}"), netdev);
        }
    }

    fn tree(&self) -> HostTree {
        HostTree::from_folder(self.sys.path())
    }

    fn resolve(&self, names: &[&str]) -> Result<Vec<LocalRail>, UnusableRail> {
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        resolve_rails(&names, &self.tree(), &self.addresses)
    }

    fn one(&self, name: &str) -> LocalRail {
        self.resolve(&[name]).unwrap().remove(0)
    }

    fn refused(&self, name: &str) -> String {
        let error = self.resolve(&[name]).unwrap_err();
        assert_eq!(error.interface(), name);
        format!("{error}; {}", error.remedy())
    }
}

/// A ConnectX card as the kernel shows it: link-local GIDs first, each GID once for each RoCE version.
fn connectx() -> Machine {
    let mut m = Machine::new();
    m.netdev("eth2", &[("fe80::1", 64), ("10.7.0.5", 24), ("fd00:7::5", 64)]);
    m.netdev("eth0", &[("192.0.2.1", 24)]);
    m.device(&CONNECTX, 1);
    let gid = |i, gid, kind| m.gid("mlx5_0", 1, i, gid, kind, "eth2");
    gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1");
    gid(1, "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2");
    gid(2, "0000:0000:0000:0000:0000:ffff:0a07:0005", "IB/RoCE v1");
    gid(3, "0000:0000:0000:0000:0000:ffff:0a07:0005", "RoCE v2");
    gid(4, "fd00:0007:0000:0000:0000:0000:0000:0005", "RoCE v2");
    m.gid("mlx5_0", 1, 5, "0000:0000:0000:0000:0000:0000:0000:0000", "", "");
    m
}

#[test]
fn roce_v2_of_the_interfaces_own_address_comes_first() {
    let rail = connectx().one("eth2");
    assert_eq!((rail.device.as_str(), rail.port, rail.gid.index, rail.numa_node), ("mlx5_0", 1, 3, Some(1)));
    assert_eq!((rail.rail.link, rail.rail.speed_mbit, rail.rail.fabric), (RailLink::RoceV2, 100_000, 0));
    assert_eq!((rail.rail.address.to_string().as_str(), rail.rail.prefix_len), ("10.7.0.5", 24));
    let why = "eth2 is mlx5_0 port 1 (RoCE v2, 100 Gb/s (4X EDR), NUMA node 1); GID 3 ::ffff:10.7.0.5: the RoCE v2 \
               GID of eth2's address 10.7.0.5/24; of GID 0 fe80::1 (RoCE v1), GID 1 fe80::1 (RoCE v2)";
    assert!(rail.why.starts_with(why), "{}", rail.why);
}

#[test]
fn without_an_ipv4_address_the_ipv6_one_counts_and_v1_only_when_there_is_no_v2() {
    let mut m = connectx();
    m.addresses.retain(|a| a.ip.is_ipv6());
    let rail = m.one("eth2");
    assert_eq!((rail.gid.index, rail.rail.address.to_string().as_str()), (4, "fd00:7::5"));
    let m = connectx();
    for index in [1, 3, 4] {
        m.put(&format!("class/infiniband/mlx5_0/ports/1/gid_attrs/types/{index}"), "IB/RoCE v1");
    }
    assert_eq!(m.one("eth2").rail.link, RailLink::RoceV1);
}

#[test]
fn vlans_and_bonds_are_found_by_the_gid_table() {
    let mut m = connectx();
    m.netdev("eth2.100", &[("10.100.0.5", 24)]);
    m.gid("mlx5_0", 1, 6, "0000:0000:0000:0000:0000:ffff:0a64:0005", "RoCE v2", "eth2.100");
    let rail = m.one("eth2.100");
    assert_eq!((rail.device.as_str(), rail.gid.index), ("mlx5_0", 6));
    // A bond whose two ports both have the GIDs: the port of the active member carries the traffic.
    let mut m = Machine::new();
    m.netdev("bond0", &[("10.8.0.5", 24)]);
    for (n, netdev) in [(0, "eth2"), (1, "eth3")] {
        let name = format!("mlx5_{n}");
        m.netdev(netdev, &[]);
        m.device(&Device { name: &name, ..CONNECTX }, 1);
        m.put(&format!("class/infiniband/{name}/device/net/{netdev}/operstate"), "up");
        m.put(&format!("class/net/bond0/lower_{netdev}/operstate"), "up");
        m.gid(&name, 1, 2, "0000:0000:0000:0000:0000:ffff:0a08:0005", "RoCE v2", "bond0");
    }
    m.put("class/net/bond0/bonding/active_slave", "eth3");
    let rail = m.one("bond0");
    assert_eq!(rail.device, "mlx5_1");
    assert!(rail.why.contains("(2 devices have the interface; this one carries its traffic)"), "{}", rail.why);
    m.put("class/infiniband/mlx5_1/ports/1/state", "1: DOWN");
    assert_eq!(m.one("bond0").device, "mlx5_0");
}

fn infiniband() -> Machine {
    let mut m = Machine::new();
    let ib = Device { link_layer: "InfiniBand", rate: "400 Gb/sec (4X NDR)", numa: "-1", ..CONNECTX };
    for (port, netdev) in [(1, "ib0"), (2, "ib1")] {
        m.netdev(netdev, &[(&format!("10.9.{port}.5"), 24)]);
        m.device(&ib, port);
        m.put(&format!("class/infiniband/mlx5_0/device/net/{netdev}/x"), "");
        m.put(&format!("class/net/{netdev}/dev_port"), &(port - 1).to_string());
        m.put(
            &format!("class/net/{netdev}/address"),
            &format!("00:00:10:29:fe:80:00:00:00:00:00:0{port}:b8:ce:f6:03:00:12:34:5{port}"),
        );
        m.gid("mlx5_0", port, 0, &format!("fe80:0000:0000:000{port}:b8ce:f603:0012:345{port}"), "IB/RoCE v1", "");
    }
    m
}

#[test]
fn ipoib_interfaces_are_found_by_their_port() {
    let mut m = infiniband();
    let rails = m.resolve(&["ib1", "ib0", "ib1"]).unwrap();
    let seen: Vec<_> = rails.iter().map(|r| (r.rail.name.as_str(), r.port, r.rail.fabric)).collect();
    assert_eq!(seen, [("ib1", 2, 0xfe80_0000_0000_0002), ("ib0", 1, 0xfe80_0000_0000_0001)]);
    assert_eq!(
        (rails[0].rail.link, rails[0].rail.speed_mbit, rails[0].numa_node),
        (RailLink::InfiniBand, 400_000, None)
    );
    assert!(rails[0].why.contains("the GID in ib1's hardware address"), "{}", rails[0].why);
    // A partition of ib1, and a bond of both.
    m.netdev("ib1.8001", &[("10.10.0.5", 24)]);
    m.put("class/net/ib1.8001/parent", "ib1");
    assert_eq!(m.one("ib1.8001").port, 2);
    m.netdev("bond1", &[("10.11.0.5", 24)]);
    m.put("class/net/bond1/lower_ib0/operstate", "up");
    m.put("class/net/bond1/lower_ib1/operstate", "up");
    m.put("class/net/bond1/bonding/active_slave", "ib1");
    assert_eq!(m.one("bond1").port, 2);
}

/// One port of the card carries InfiniBand, the other one Ethernet.
/// The only rail of an interface of a made-up host.
fn rail_of(made: &hosts::Made, interface: &str, ip: &str) -> LocalRail {
    let dir = tempfile::tempdir().unwrap();
    made.write_to(dir.path());
    let address = HostAddress { interface: interface.to_owned(), ip: ip.parse().unwrap(), prefix_len: 24 };
    let rails = resolve_rails(&[interface.to_owned()], &HostTree::from_folder(dir.path()), &[address]).unwrap();
    rails.into_iter().next().unwrap()
}

#[test]
fn a_plane_is_the_port_that_its_gids_name_and_a_management_device_is_no_rail() {
    let plane = rail_of(&hosts::planes(), "eth_p1", "10.1.2.7");
    assert_eq!((plane.device.as_str(), plane.port, plane.rail.speed_mbit), ("mlx5_0", 6, 200_000));
    let xdr = rail_of(&hosts::xdr(), "ibp3s0", "10.9.0.2");
    assert_eq!((xdr.device.as_str(), xdr.port), ("mlx5_0", 1));
    assert!(!xdr.why.contains("devices have the interface"), "{}", xdr.why);
}

#[test]
fn the_ports_of_one_card_may_have_different_link_layers() {
    let mut m = infiniband();
    m.netdev("eth2", &[("10.7.0.5", 24)]);
    m.device(&CONNECTX, 2);
    m.put("class/infiniband/mlx5_0/device/net/eth2/x", "");
    m.gid("mlx5_0", 2, 0, "fe80:0000:0000:0000:b8ce:f603:0012:3453", "RoCE v2", "eth2");
    m.gid("mlx5_0", 2, 1, "0000:0000:0000:0000:0000:ffff:0a07:0005", "RoCE v2", "eth2");
    let rails = m.resolve(&["ib0", "eth2"]).unwrap();
    let seen: Vec<_> = rails.iter().map(|rail| (rail.port, rail.rail.link, rail.rail.speed_mbit)).collect();
    assert_eq!(seen, [(1, RailLink::InfiniBand, 400_000), (2, RailLink::RoceV2, 100_000)]);
}

#[test]
fn soft_roce_and_iwarp_name_their_interface() {
    let mut m = Machine::new();
    m.netdev("eth9", &[("10.1.0.1", 24)]);
    m.netdev("eth8", &[("10.2.0.1", 24)]);
    let rxe = Device { name: "rxe0", rate: "2.5 Gb/sec (1X SDR)", ..CONNECTX };
    m.device(&rxe, 1);
    m.put("class/infiniband/rxe0/parent", "eth9");
    m.gid("rxe0", 1, 1, "0000:0000:0000:0000:0000:ffff:0a01:0001", "RoCE v2", "eth9");
    m.device(&Device { name: "siw0", node_type: "4: RNIC", ..rxe }, 1);
    m.put("class/infiniband/siw0/parent", "eth8");
    m.gid("siw0", 1, 0, "0202:0300:0000:0000:0000:0000:0000:0000", "IB/RoCE v1", "");
    let [rxe, siw] = m.resolve(&["eth9", "eth8"]).unwrap().try_into().unwrap();
    assert_eq!((rxe.device.as_str(), rxe.rail.link, rxe.rail.speed_mbit), ("rxe0", RailLink::RoceV2, 2_500));
    assert_eq!((siw.device.as_str(), siw.rail.link), ("siw0", RailLink::Iwarp));
    assert!(rxe.is_link_up(&m.tree()));
    m.put("class/net/eth9/operstate", "down");
    assert!(!rxe.is_link_up(&m.tree()) && siw.is_link_up(&m.tree()));
    m.put("class/infiniband/siw0/ports/1/state", "1: DOWN");
    assert!(!siw.is_link_up(&m.tree()));
}

#[test]
fn each_way_of_being_unusable_is_said() {
    let mut m = connectx();
    m.netdev("eth5", &[("fe80::5", 64), ("169.254.1.1", 16)]);
    m.gid("mlx5_0", 1, 7, "fe80:0000:0000:0000:0000:0000:0000:0005", "RoCE v2", "eth5");
    let mut wrong = vec![
        (m.refused("ib7"), vec!["no interface of that name", "interfaces with an RDMA device are eth2"]),
        (m.refused("../net/eth2"), vec!["no interface of that name"]),
        (m.refused("eth0"), vec!["no RDMA device belongs to it (there are mlx5_0 port 1)", "are eth2, eth5"]),
        (
            m.refused("eth5"),
            vec!["no address that other machines can reach, only fe80::5, 169.254.1.1", "ip address add"],
        ),
        (Machine::new().refused("lo"), vec!["(this host has none)", "modprobe rdma_rxe"]),
    ];
    m.addresses.retain(|a| a.interface != "eth2" || a.ip.to_string() == "fd00:7::5");
    std::fs::remove_file(m.sys.path().join("sys/class/infiniband/mlx5_0/ports/1/gids/4")).unwrap();
    wrong.push((
        m.refused("eth2"),
        vec!["mlx5_0 has no GID for fd00:7::5; it has GID 0 fe80::1 (RoCE v1)", "show_gids"],
    ));
    m.put("class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
    m.put("class/infiniband/mlx5_0/ports/1/phys_state", "3: Disabled");
    wrong.push((
        m.refused("eth2"),
        vec!["port 1 of mlx5_0 is not active: its state is 'DOWN', its link 'Disabled'", "cable"],
    ));
    let m = infiniband();
    m.put("class/infiniband/mlx5_0/ports/1/state", "2: INIT");
    wrong.push((m.refused("ib0"), vec!["state is 'INIT'", "subnet manager"]));
    for (text, says) in wrong {
        for word in says {
            assert!(text.contains(word), "'{word}' is not in: {text}");
        }
    }
}

#[test]
fn too_little_memory_to_lock_names_the_number_and_every_place_to_raise_it() {
    let limit = |limit, lifted| check_memlock("ib0", 300 << 20, MemlockLimit { limit, lifted });
    assert!(limit(None, false).is_ok() && limit(Some(300 << 20), false).is_ok() && limit(Some(1 << 16), true).is_ok());
    let error = limit(Some(64 << 10), false).unwrap_err();
    assert_eq!(error.to_string(), "--rdma-network ib0: 300M of memory have to be locked for RDMA, the limit is 64K");
    for word in ["ulimit -l 307200", "limits.conf", "LimitMEMLOCK", "containerd", "IPC_LOCK", "--buffer-size"] {
        assert!(error.remedy().contains(word), "{}", error.remedy());
    }
    // Whatever this machine's limits are, they can be read.
    let _ = MemlockLimit::of_process();
    assert!(!spurline_rails::host_addresses().unwrap().is_empty());
}

proptest::proptest! {
    // Each case writes a tree.
    #![proptest_config(proptest::test_runner::Config::with_cases(64))]
    #[test]
    fn no_content_of_any_file_panics(
        gid in "[0-9a-f:]{0,40}|.{0,12}", state in ".{0,8}", rate in ".{0,8}", address in "[0-9a-f:]{0,60}",
        layer in "InfiniBand|Ethernet|.{0,4}", name in "eth2|[./a-z]{0,8}",
    ) {
        let m = connectx();
        m.put("class/infiniband/mlx5_0/ports/1/gids/3", &gid);
        m.put("class/infiniband/mlx5_0/ports/1/state", &format!("4{state}"));
        m.put("class/infiniband/mlx5_0/ports/1/rate", &rate);
        m.put("class/infiniband/mlx5_0/ports/1/link_layer", &layer);
        m.put("class/net/eth2/address", &address);
        match m.resolve(&[&name]) {
            Ok(rails) => proptest::prop_assert_eq!(rails.len(), 1),
            Err(error) => proptest::prop_assert!(!error.remedy().is_empty()),
        }
    }
}
