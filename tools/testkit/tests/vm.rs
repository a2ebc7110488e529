//! The virtual machine itself: it has the promised devices and returns exit code, output and files.

use std::path::Path;
use std::process::Command;

#[test]
fn devices_are_there_and_exit_code_output_and_files_come_out() {
    let share = std::env::temp_dir().join(format!("spurline-vm-share-{}", std::process::id()));
    std::fs::create_dir_all(&share).unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let inside = "cat /sys/class/infiniband/rxe?/ports/1/state; rdma link; ls /dev/infiniband/rdma_cm; \
        touch written-in-the-guest; echo \"$1\" > $SPURLINE_TEST_VM_SHARE/file; exit 42";
    let out = Command::new(here.join("../../scripts/vm"))
        .current_dir(here)
        .args(["--net", "two", "--share"])
        .arg(&share)
        .args(["bash", "-c", inside, "-", "two words"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let file = std::fs::read_to_string(share.join("file"));
    let _ = std::fs::remove_dir_all(&share);
    if out.status.code() == Some(3) {
        spurline_testkit::skip("rdma", text.trim_start_matches("SKIP: ").trim());
        return;
    }
    assert_eq!(out.status.code(), Some(42), "{text}{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(file.unwrap(), "two words\n");
    assert_eq!(text.matches("4: ACTIVE").count(), 2, "{text}");
    assert!(text.contains("netdev rail0") && text.contains("netdev rail1"), "{text}");
    assert!(text.contains("/dev/infiniband/rdma_cm"), "{text}");
    // The guest sees this machine's files and writes into a copy of its own.
    assert!(!here.join("written-in-the-guest").exists());
}
