//! An origin that is stopped: what is cached reads on.

use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs;
use std::time::Duration;

/// Beyond the cache times of the mount.
const PAST_THE_CACHES: Duration = Duration::from_millis(1200);

#[test]
fn a_cached_data_set_reads_on_while_its_server_is_stopped() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    let at = server.address();
    let fill = |server: &S3Server| {
        server.create_bucket("data");
        for n in 0..60u64 {
            server.put("data", &format!("train/{}/{n}.bin", n % 3), &bytes(n, 20_000 + n as usize * 30_000));
        }
    };
    fill(&server);
    let mount = world.mount("s3://data", &["--endpoint-url", &server.endpoint(), "--origin-timeout", "5s"]);
    let want = tree(&mount.at);
    assert_eq!(want.len(), 64);
    let fetched = mount.count("object", "get_ops");

    drop(server);
    for round in 0..3 {
        std::thread::sleep(PAST_THE_CACHES);
        assert_same(&tree(&mount.at), &want);
        assert_eq!(mount.count("object", "get_ops"), fetched, "round {round}: no block is requested");
    }
    let stats = mount.stats();
    assert!(count(&stats, "metadata", "stale_answers") > 0, "{stats}");
    assert_eq!((count(&stats, "metadata", "silent_origins"), count(&stats, "fuse", "errors")), (1, 0));
    let status = String::from_utf8(world.run(&["status", "--json"]).stdout).unwrap();
    assert!(status.contains("origin does not respond"), "{status}");
    // A name that was never seen is an error, not an absence.
    let unknown = fs::metadata(mount.path("train/9")).unwrap_err();
    assert!(unknown.raw_os_error() != Some(libc::ENOENT), "{unknown}");

    let server = S3Server::in_memory_on(at).unwrap();
    fill(&server);
    mount.process().wait_for("responds again");
    std::thread::sleep(PAST_THE_CACHES);
    assert_same(&tree(&mount.at), &want);
    assert_eq!((mount.count("metadata", "silent_origins"), mount.count("object", "get_ops")), (0, fetched));
    let log = mount.process().log();
    for once in ["does not respond", "stay valid for 300 s (--stale-if-error)", "responds again after"] {
        assert_eq!(log.matches(once).count(), 1, "{once:?} in {log}");
    }
    mount.unmount();
}
