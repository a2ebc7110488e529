//! Verbs on real devices, in the virtual machine: connections over IPv4 and IPv6, writes, faults and their messages.

use spurline_mem::BufferPool;
use spurline_testkit::{GuestNet, run_in_guest};
use spurline_verbs::{
    CmChannel, CmEventKind, ConnectOptions, DeviceContext, DeviceProblem, GidType, LinkLayer, LoanSettled,
    MemoryAccess, MemoryRegion, ProtectionDomain, QueueDepths, QueuePair, RdmaUnavailable, RemoteRegion, VerbsError,
    VerbsLibrary, list_devices,
};
use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const OPTIONS: ConnectOptions = ConnectOptions { ack_timeout: Some(14), retries: 6, rnr_retries: 6 };
const DEPTHS: QueueDepths = QueueDepths { receives: 8, sends: 8 };
const SLOT: usize = 4096;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// A device opened through an address, with a pool registered.
struct Rail {
    verbs: Arc<VerbsLibrary>,
    domain: Arc<ProtectionDomain>,
    memory: Arc<MemoryRegion>,
    ip: IpAddr,
}

impl Rail {
    fn open(ip: &str, access: MemoryAccess) -> Rail {
        let verbs = VerbsLibrary::load().unwrap();
        let ip: IpAddr = ip.parse().unwrap();
        let mut anchor = CmChannel::new(&verbs).unwrap().create_id().unwrap();
        anchor.bind(SocketAddr::new(ip, 0)).unwrap();
        let domain = ProtectionDomain::new(&DeviceContext::of_id(anchor).unwrap()).unwrap();
        let pool = BufferPool::new(16 << 20, 4 << 20).unwrap();
        let memory = domain.register_pool(&pool, access).unwrap();
        Rail { verbs, domain, memory, ip }
    }

    /// Posts all receives and leaves four slots for sending.
    fn equip(&self, pair: &mut QueuePair) {
        let buf = self.memory.pool().try_alloc(SLOT * 12).unwrap();
        let mut slots = self.memory.split_slots(buf, SLOT).unwrap();
        for _ in 0..4 {
            pair.keep_slot(slots.pop().unwrap());
        }
        for slot in slots {
            pair.post_receive(slot).unwrap();
        }
    }

    fn connect(&self, to: SocketAddr, deadline: Instant) -> Result<QueuePair, VerbsError> {
        let mut id = CmChannel::new(&self.verbs)?.create_id()?;
        id.resolve(self.ip, to, deadline)?;
        let mut pair = QueuePair::new(id, &self.domain, DEPTHS, 0)?;
        self.equip(&mut pair);
        let private = pair.connect(OPTIONS, b"from the reader", deadline)?;
        assert!(private.starts_with(b"from the node"));
        Ok(pair)
    }

    /// Accepts one connection and hands it to `serve`.
    fn listen(self, serve: impl FnOnce(&Rail, QueuePair) + Send + 'static) -> (SocketAddr, JoinHandle<()>) {
        let channel = CmChannel::new(&self.verbs).unwrap();
        let mut listener = channel.create_id().unwrap();
        let addr = listener.listen(SocketAddr::new(self.ip, 0), 8).unwrap();
        let thread = std::thread::spawn(move || {
            let request = channel.next_event(soon()).unwrap().expect("no client connected");
            assert_eq!(request.key, listener.key());
            let CmEventKind::ConnectRequest { id, private } = request.kind else { panic!("{request:?}") };
            assert!(private.starts_with(b"from the reader"));
            let key = id.key();
            let mut pair = QueuePair::new(id, &self.domain, DEPTHS, 0).unwrap();
            self.equip(&mut pair);
            pair.accept(OPTIONS, b"from the node").unwrap();
            let stands = channel.next_event(soon()).unwrap().expect("no event after accepting");
            assert!(stands.key == key && matches!(stands.kind, CmEventKind::Established { .. }), "{stands:?}");
            // The channel's other events tell of the connection's end.
            let breaker = pair.breaker();
            let watch = std::thread::spawn(move || {
                while !breaker.is_broken() {
                    let event = channel.next_event(Instant::now() + Duration::from_millis(50)).unwrap();
                    if event.is_some_and(|e| e.key == key && matches!(e.kind, CmEventKind::Disconnected)) {
                        breaker.break_now("the reader ended it");
                    }
                }
            });
            serve(&self, pair);
            watch.join().unwrap();
            drop(listener);
        });
        (addr, thread)
    }
}

fn send(pair: &mut QueuePair, bytes: &[u8]) {
    let mut slot = loop {
        match pair.free_slot().unwrap() {
            Some(slot) => break slot,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    pair.send_message(slot, bytes.len(), soon()).unwrap();
}

/// The next message, or announced write: its bytes (none of a write), its length, its number.
fn receive(pair: &mut QueuePair) -> Result<(Vec<u8>, usize, Option<u32>), VerbsError> {
    assert!(pair.wait_arrival(soon())?, "nothing arrived");
    let got = pair.poll_receive()?.expect("wait said that something arrived");
    let bytes = if got.immediate.is_none() { got.slot.bytes()[..got.len].to_vec() } else { Vec::new() };
    pair.post_receive(got.slot)?;
    Ok((bytes, got.len, got.immediate))
}

fn encode(region: RemoteRegion) -> Vec<u8> {
    [&region.addr.to_le_bytes()[..], &region.len.to_le_bytes(), &region.rkey.to_le_bytes()].concat()
}

fn decode(bytes: &[u8]) -> RemoteRegion {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    RemoteRegion { addr: word(0), len: word(8), rkey: u32::from_le_bytes(bytes[16..20].try_into().unwrap()) }
}

/// What the node writes: 1 MiB of a pattern.
fn pattern(memory: &MemoryRegion) -> spurline_mem::PoolBuf {
    let mut buf = memory.pool().try_alloc(1 << 20).unwrap();
    for (i, byte) in buf.iter_mut().enumerate() {
        *byte = (i * 7 + i / 251) as u8;
    }
    buf
}

/// Answers each region it is sent by writing the pattern there, announced by 0xabcd0000 + its number.
fn serve_writes(rail: &Rail, mut pair: QueuePair, end: mpsc::Sender<Result<(), VerbsError>>) {
    let bytes = pattern(&rail.memory);
    let mut number = 0xabcd_0000u32;
    let ended = loop {
        let region = match receive(&mut pair) {
            Ok((message, ..)) => decode(&message),
            Err(e) => break Err(e),
        };
        let half = bytes.len() / 2;
        let wrote = pair.write_borrowed(soon(), |writing| {
            writing.post_write(&rail.memory, &bytes[..half], region, 0, None)?;
            writing.post_write(&rail.memory, &bytes[half..], region, half as u64, Some(number))
        });
        if let Err(e) = wrote {
            break Err(e);
        }
        number += 1;
    };
    let _ = end.send(ended);
}

fn exchange_writes(ip: &str) {
    let (send_end, end) = mpsc::channel();
    let (to, node) = Rail::open(ip, MemoryAccess::Local).listen(move |rail, pair| serve_writes(rail, pair, send_end));
    let rail = Rail::open(ip, MemoryAccess::PeerWrites);
    let mut pair = rail.connect(to, soon()).unwrap();
    println!("connected: {} queue pair {:#x}", pair.subject(), pair.qp_number());
    assert!(pair.subject().contains("rxe0 port 1"), "{}", pair.subject());
    let want = pattern(&rail.memory);
    let mut dst = rail.memory.pool().try_alloc(1 << 20).unwrap();
    for round in 0..5u32 {
        dst.fill(0);
        let (number, len) = pair
            .lend_memory(&rail.memory, &mut dst, |pair, lent| {
                send(pair, &encode(lent.region()));
                let (_, len, number) = receive(pair).unwrap();
                let mut piece = [0u8; 100];
                lent.copy_to(1000, &mut piece);
                assert_eq!(piece[..], want[1000..1100]);
                ((number, len), LoanSettled::Yes)
            })
            .unwrap();
        assert_eq!((number, len), (Some(0xabcd_0000 + round), dst.len() / 2));
        assert!(dst[..] == want[..], "wrong bytes");
    }
    // An idle path can be probed.
    pair.post_probe(soon()).unwrap();
    drop(pair);
    let ended = end.recv_timeout(Duration::from_secs(60)).unwrap().unwrap_err();
    println!("the node saw: {ended}");
    assert!(matches!(ended, VerbsError::Disconnected { .. } | VerbsError::Work { .. }), "{ended}");
    node.join().unwrap();
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_a_devices_are_described() {
    let verbs = VerbsLibrary::load().unwrap();
    let found = list_devices(&verbs).unwrap();
    println!("{found:#?}");
    assert_eq!(found.iter().map(|d| d.name.as_str()).collect::<Vec<_>>(), ["rxe0", "rxe1"]);
    for device in &found {
        assert!(device.limits.queue_pairs > 100 && device.limits.work_requests > 100 && device.limits.sge > 0);
        let port = &device.ports[0];
        assert!(port.state.is_active() && port.link_layer == LinkLayer::Ethernet && port.mtu >= 1024);
        let rail = if device.name == "rxe0" { "::ffff:10.77.0.1" } else { "::ffff:10.77.1.1" };
        let gid = port.gids.iter().find(|g| g.gid.to_string() == rail).expect("the address's GID");
        assert!(gid.kind == GidType::RoceV2 && gid.interface > 0, "{gid:?}");
    }
    let error = DeviceContext::open(&verbs, "mlx5_0").err().unwrap();
    assert!(error.to_string().contains("no RDMA device named mlx5_0"), "{error}");
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_b_writes_over_ipv4() {
    exchange_writes("10.77.0.1");
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_b_writes_over_ipv6() {
    exchange_writes("fd77:0::1");
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_b_reads_of_lent_memory() {
    let (done, wait) = mpsc::channel::<()>();
    let (to, node) = Rail::open("10.77.0.1", MemoryAccess::PeerReadsAndWrites).listen(move |rail, mut pair| {
        let mut bytes = pattern(&rail.memory);
        let lent = pair.lend_memory(&rail.memory, &mut bytes, |pair, lent| {
            send(pair, &encode(lent.region()));
            wait.recv_timeout(Duration::from_secs(60)).unwrap();
            (lent.read_byte(3), LoanSettled::No)
        });
        // A write without a number is seen by looking.
        assert_eq!(lent.unwrap(), 0x5a);
    });
    let rail = Rail::open("10.77.0.1", MemoryAccess::Local);
    let mut id = CmChannel::new(&rail.verbs).unwrap().create_id().unwrap();
    id.resolve(rail.ip, to, soon()).unwrap();
    let mut pair = QueuePair::new(id, &rail.domain, DEPTHS, 0).unwrap();
    rail.equip(&mut pair);
    pair.allow_reads(4);
    pair.connect(OPTIONS, b"from the reader", soon()).unwrap();
    let region = decode(&receive(&mut pair).unwrap().0);
    let want = pattern(&rail.memory);
    let buf = rail.memory.pool().try_alloc(2 << 20).unwrap();
    while pair.free_slot().unwrap().is_some() {}
    let mut slots = rail.memory.split_slots(buf, 1 << 20).unwrap();
    // Nothing is read past either end.
    let wrong = pair.read_slot(slots.pop().unwrap(), 1 << 20, RemoteRegion { len: 100, ..region }, soon());
    assert!(matches!(wrong, Err(VerbsError::Misuse(_))));
    // Memory that is not registered with this queue pair's device is refused too.
    let other = Rail::open("10.77.0.1", MemoryAccess::Local);
    let mut foreign =
        other.memory.split_slots(other.memory.pool().try_alloc(4096 * 4).unwrap(), 4096).unwrap().into_iter();
    let mut foreign = || foreign.next().unwrap();
    let (sent, written) =
        (pair.send_message(foreign(), 4, soon()), pair.write_slot(foreign(), 4, region, None, soon()));
    let (read, posted) = (pair.read_slot(foreign(), 4, region, soon()), pair.post_receive(foreign()));
    for refused in [sent, written, read, posted] {
        assert!(matches!(refused, Err(VerbsError::Misuse(_))), "{refused:?}");
    }
    for _ in 0..5 {
        let mut slot = slots.pop().unwrap();
        slot.bytes_mut().fill(0);
        pair.read_slot(slot, 1 << 20, region, soon()).unwrap();
        pair.wait_in_flight(0, soon()).unwrap();
        let slot = pair.free_slot().unwrap().unwrap();
        assert!(slot.bytes() == &want[..], "wrong bytes");
        slots.push(slot);
    }
    let mut slot = slots.pop().unwrap();
    slot.bytes_mut()[..4].fill(0x5a);
    pair.write_slot(slot, 4, region, None, soon()).unwrap();
    pair.wait_in_flight(0, soon()).unwrap();
    done.send(()).unwrap();
    node.join().unwrap();
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_b_memory_that_peers_only_write_is_not_read() {
    let (done, wait) = mpsc::channel::<()>();
    let (to, node) = Rail::open("10.77.0.1", MemoryAccess::PeerWrites).listen(move |rail, mut pair| {
        let mut bytes = pattern(&rail.memory);
        rail_lend(rail, &mut pair, &mut bytes, |_| {
            assert_ne!(wait.recv_timeout(Duration::from_secs(60)), Err(mpsc::RecvTimeoutError::Timeout))
        });
    });
    let rail = Rail::open("10.77.0.1", MemoryAccess::Local);
    let mut pair = rail.connect(to, soon()).unwrap();
    let region = decode(&receive(&mut pair).unwrap().0);
    let mut slot = pair.free_slot().unwrap().unwrap();
    slot.bytes_mut().fill(0);
    pair.read_slot(slot, 100, region, soon()).unwrap();
    let error = pair.wait_in_flight(0, soon()).unwrap_err();
    assert!(error.to_string().contains("REM_ACCESS_ERR"), "{error}");
    done.send(()).unwrap();
    node.join().unwrap();
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_c_nobody_listens_and_nobody_is_there() {
    let rail = Rail::open("10.77.0.1", MemoryAccess::PeerWrites);
    let error = rail.connect("10.77.0.1:9".parse().unwrap(), soon()).err().unwrap();
    println!("{error}");
    assert!(
        matches!(error, VerbsError::Rejected { .. }) && error.to_string().contains("no process listens"),
        "{error}"
    );
    // The kernel would say so after more than a minute.
    let begun = Instant::now();
    let deadline = begun + Duration::from_millis(700);
    let error = rail.connect("10.77.0.99:9".parse().unwrap(), deadline).err().unwrap();
    println!("{error}");
    assert!(
        matches!(error, VerbsError::Timeout { .. } | VerbsError::Unreachable { .. } | VerbsError::Call { .. }),
        "{error}"
    );
    drop(rail);
    // No device has this address.
    let verbs = VerbsLibrary::load().unwrap();
    let mut id = CmChannel::new(&verbs).unwrap().create_id().unwrap();
    let error = id.bind("10.99.0.1:0".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("no RDMA device has this address"), "{error}");
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_d_a_stale_key_is_named_in_words() {
    let (tell, told) = mpsc::channel();
    let (to, node) = Rail::open("10.77.0.1", MemoryAccess::Local).listen(move |rail, mut pair| {
        let (message, ..) = receive(&mut pair).unwrap();
        let region = RemoteRegion { rkey: decode(&message).rkey ^ 0x55aa_0000, ..decode(&message) };
        let bytes = pattern(&rail.memory);
        let wrote = pair.write_borrowed(soon(), |w| w.post_write(&rail.memory, &bytes, region, 0, Some(1)));
        tell.send(wrote.unwrap_err()).unwrap();
        // A queue pair that failed stays failed.
        assert!(pair.post_probe(soon()).is_err());
    });
    let rail = Rail::open("10.77.0.1", MemoryAccess::PeerWrites);
    let mut pair = rail.connect(to, soon()).unwrap();
    let mut dst = rail.memory.pool().try_alloc(1 << 20).unwrap();
    dst.fill(0);
    rail_lend(&rail, &mut pair, &mut dst, |pair| {
        assert!(receive(pair).is_err());
    });
    assert!(dst.iter().all(|b| *b == 0), "a write with another's key landed");
    let error = told.recv_timeout(Duration::from_secs(60)).unwrap();
    println!("{error}");
    let text = error.to_string();
    for part in ["REM_ACCESS_ERR", "rxe0 port 1", "GID ::ffff:10.77.0.1", "queue pair 0x", "vendor error"] {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
    node.join().unwrap();
}

/// Lends `dst`, sends the region and does not settle.
fn rail_lend(rail: &Rail, pair: &mut QueuePair, dst: &mut [u8], then: impl FnOnce(&mut QueuePair)) {
    pair.lend_memory(&rail.memory, dst, |pair, lent| {
        send(pair, &encode(lent.region()));
        then(pair);
        ((), LoanSettled::No)
    })
    .unwrap();
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_e_no_late_write_lands() {
    let (given_up, wait) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let (to, node) = Rail::open("10.77.0.1", MemoryAccess::Local).listen(move |rail, mut pair| {
        let (message, ..) = receive(&mut pair).unwrap();
        wait.recv_timeout(Duration::from_secs(60)).unwrap();
        let bytes = pattern(&rail.memory);
        let region = decode(&message);
        tell.send(pair.write_borrowed(soon(), |w| w.post_write(&rail.memory, &bytes, region, 0, Some(1)))).unwrap();
    });
    let rail = Rail::open("10.77.0.1", MemoryAccess::PeerWrites);
    let mut pair = rail.connect(to, soon()).unwrap();
    let mut dst = rail.memory.pool().try_alloc(1 << 20).unwrap();
    dst.fill(0);
    rail_lend(&rail, &mut pair, &mut dst, |_| {});
    given_up.send(()).unwrap();
    let wrote = told.recv_timeout(Duration::from_secs(60)).unwrap();
    println!("the late write: {}", wrote.unwrap_err());
    node.join().unwrap();
    assert!(dst.iter().all(|b| *b == 0), "a late write landed");
    // The queue pair is gone for every use.
    assert!(pair.post_probe(soon()).is_err() && pair.poll_receive().is_err());
    // Memory that is not registered for it can't be lent.
    let mut elsewhere = vec![0u8; 4096];
    let refused = pair.lend_memory(&rail.memory, &mut elsewhere, |_, _| ((), LoanSettled::Yes));
    assert!(matches!(refused, Err(VerbsError::Misuse(_))));
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_f_a_broken_pair_wakes_its_waiter() {
    let (done, wait) = mpsc::channel::<()>();
    let (to, node) = Rail::open("10.77.0.1", MemoryAccess::Local).listen(move |_, _pair| {
        let _ = wait.recv_timeout(Duration::from_secs(60));
    });
    let rail = Rail::open("10.77.0.1", MemoryAccess::PeerWrites);
    let mut pair = rail.connect(to, soon()).unwrap();
    let breaker = pair.breaker();
    let other = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        breaker.break_now("the cable was pulled");
    });
    let error = receive(&mut pair).unwrap_err();
    assert!(error.to_string().contains("is over: the cable was pulled"), "{error}");
    other.join().unwrap();
    assert!(pair.breaker().is_broken());
    done.send(()).unwrap();
    node.join().unwrap();
    drop(pair);
    // Everything is given back when the last user goes.
    assert_eq!(rail.memory.pool().used_bytes(), 0);
}

fn sh(command: &str) {
    let out = Command::new("bash").args(["-c", command]).output().unwrap();
    assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_g_a_port_that_goes_down_is_told() {
    let rail = Rail::open("10.77.1.1", MemoryAccess::PeerWrites);
    let context = rail.domain.context();
    while context.next_problem().is_some() {}
    sh("ip link set rail1 down");
    let until = soon();
    let problem = loop {
        match context.next_problem() {
            Some(problem @ (DeviceProblem::PortDown(_) | DeviceProblem::Fatal)) => break problem,
            _ if Instant::now() > until => panic!("the device said nothing"),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    assert_eq!(problem, DeviceProblem::PortDown(1));
    assert!(!context.port_info(1).unwrap().state.is_active());
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_h_a_low_limit_of_locked_memory_is_named() {
    let exe = std::env::current_exe().unwrap();
    let out = Command::new("prlimit")
        .args(["--memlock=65536:65536", "setpriv", "--bounding-set=-ipc_lock"])
        .arg(exe)
        .args(["--ignored", "--exact", "child_registers_too_much"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "guest_h_a_low_limit_of_locked_memory_is_named runs it with little memory to lock"]
fn child_registers_too_much() {
    let verbs = VerbsLibrary::load().unwrap();
    let domain = ProtectionDomain::new(&DeviceContext::open(&verbs, "rxe0").unwrap()).unwrap();
    let pool = BufferPool::new(16 << 20, 4 << 20).unwrap();
    let error = domain.register_pool(&pool, MemoryAccess::PeerWrites).err().expect("16 MiB were locked");
    for part in ["rxe0", "16777216 bytes", "ulimit -l", "LimitMEMLOCK="] {
        assert!(error.to_string().contains(part), "'{part}' is not in: {error}");
    }
}

/// In a process of its own, as it takes the devices away: they go only when rdma_cm has none of them open.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn last_four_levels_of_not_here() {
    let verbs = VerbsLibrary::load().unwrap();
    sh("ip link set rail0 down; ip link set rail1 down");
    let absent = list_devices(&verbs).err().unwrap();
    assert!(matches!(&absent, RdmaUnavailable::Port { why } if why.contains("rxe0 port 1: DOWN")), "{absent}");
    sh("rdma link delete rxe0; rdma link delete rxe1");
    let absent = list_devices(&verbs).err().unwrap();
    assert!(matches!(absent, RdmaUnavailable::Device { .. }), "{absent}");
    sh("modprobe -r rdma_ucm");
    let absent = VerbsLibrary::load().err().unwrap();
    println!("{absent}");
    assert!(matches!(absent, RdmaUnavailable::Kernel { .. }) && absent.to_string().contains("rdma_ucm"), "{absent}");
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn in_the_virtual_machine() {
        run_in_guest(GuestNet::Two, &["guest_", "last_"]);
    }
}
