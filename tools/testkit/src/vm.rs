//! Tests that need RDMA devices: a test program starts itself again in a virtual machine with such devices. Deliberately knows
//! neither kernel nor emulator: that is `scripts/vm`.
//!
//! A test program marks tests for the guest `#[ignore]`, under names with a common prefix, and has an ordinary test that calls
//! [`run_in_guest`] with that prefix. So `cargo test` drives everything, with a single boot.

use crate::skip;
use parking_lot::Mutex;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The RDMA devices of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestNet {
    /// No device, and the kernel's modules not loaded.
    None,
    /// `rxe0` on `rail0`, with the addresses 10.77.0.1 and fd77:0::1.
    One,
    /// Also `rxe1` on `rail1`, with 10.77.1.1 and fd77:1::1.
    Two,
    /// As `Two`, on a machine of two NUMA nodes: `rail0` and `rail1` are network cards of the nodes 0 and 1.
    Numa,
    /// Two guests with two rails each, joined by cables that can lose packets: the first has 10.77.0.1 and 10.77.1.1, the second
    /// 10.77.0.2 and 10.77.1.2. Each runs the tests with the prefix and a letter, `a` or `b`; the run ends when the first guest
    /// does.
    Pair,
}

impl GuestNet {
    fn word(self) -> &'static str {
        match self {
            GuestNet::None => "none",
            GuestNet::One => "one",
            GuestNet::Two => "two",
            GuestNet::Numa => "numa",
            GuestNet::Pair => "pair",
        }
    }
}

/// The kernel of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestKernel {
    /// That of this machine's release of Debian.
    Stock,
    /// The newer one of its backports.
    Backports,
}

/// A guest that runs for longer hangs. No suite needs more than 300 s on an idle machine of two processors; suites of every night
/// take up to an hour.
const GUEST_LIMIT: Duration = Duration::from_secs(5400);

/// Whether this process runs in such a guest.
pub fn in_guest() -> bool {
    std::env::var_os("SPURLINE_TEST_IN_VM").is_some()
}

/// Runs the ignored tests of this very test program in a guest with the stock kernel, in turn, and prints the output: tests with
/// the first of `prefixes` in the name, then in a separate process tests with the next. Where there can be no guest, skips (`rdma`
/// in `SPURLINE_TEST_REQUIRE`).
///
/// # Panics
/// When a test fails, no test has a prefix, or the guest does not end within 90 minutes.
pub fn run_in_guest(net: GuestNet, prefixes: &[&str]) {
    run_in_guest_of(GuestKernel::Stock, net, prefixes);
}

/// As [`run_in_guest`], with a choice of the kernel.
///
/// # Panics
/// As [`run_in_guest`].
pub fn run_in_guest_of(kernel: GuestKernel, net: GuestNet, prefixes: &[&str]) {
    // One at a time: an emulated processor that shares a real processor is too slow for meaningful results.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let exe = std::env::current_exe().expect("a test program knows its path");
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/vm"));
    command.args(["--net", net.word(), "--seconds", &GUEST_LIMIT.as_secs().to_string()]);
    if kernel == GuestKernel::Backports {
        command.arg("--backports");
    }
    let each = "program=$1; shift; failed=0; \
        for prefix; do [ \"$SPURLINE_TEST_IN_VM\" != pair ] || prefix=$prefix$SPURLINE_TEST_VM_SIDE; \
        \"$program\" --ignored --test-threads=1 --nocapture \"$prefix\" || failed=1; done; exit $failed";
    command.args(["bash", "-c", each, "-"]).arg(exe).args(prefixes);
    let out = command.output().expect("scripts/vm starts");
    let text = String::from_utf8_lossy(&out.stdout);
    println!("{text}{}", String::from_utf8_lossy(&out.stderr));
    match out.status.code() {
        Some(3) => {
            let why = text.lines().find_map(|line| line.strip_prefix("SKIP: "));
            skip("rdma", why.unwrap_or("scripts/vm gave no reason"));
        }
        Some(0) => {
            assert!(
                text.lines().filter(|line| line.starts_with("test result: ok.") && !line.contains(" 0 passed")).count()
                    >= prefixes.len(),
                "no test has one of {prefixes:?} in its name"
            );
        }
        other => panic!("the tests in the guest failed ({other:?}), see above"),
    }
}
