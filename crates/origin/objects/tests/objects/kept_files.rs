//! Open files of a written bucket that outlive their process: each test ends a process at a moment that is hard to meet with a signal,
//! and the next process continues from what a keeper has.

use crate::common::{PlainReads, soon};
use serde_json::Value;
use spurline_object_store::{AwsCredentials, EnvironmentSource, OriginOptions};
use spurline_objects::{BucketWriteOptions, PublishedBytes, WritableBucket};
use spurline_origin::open;
use spurline_testkit::{ACCESS_KEY, ChaosProxy, ProxyFault, S3Server, SECRET_KEY, pattern};
use spurline_types::{ErrorKind, Result, Stats};
use spurline_volume::delayed::DelayedWrites as _;
use spurline_volume::hand_over::{LeftOpen, OpenHold};
use spurline_volume::kept_files::{KeptFileKey, KeptFiles};
use spurline_volume::writes::{
    AttrChange, Caller, Change, FileIdentity, NamePath, NodePath, WritableFile, WritableVolume, WritePlace,
};
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const URL: &str = "s3://bucket";
/// Length of a part.
const PART: usize = 8 << 20;
/// Where the lines of a log begin.
const FIRST_LINE: u64 = 4096;

/// What a keeper holds.
#[derive(Default)]
struct Keeper(Mutex<HashMap<KeptFileKey, OwnedFd>>);

impl Keeper {
    fn copy(&self) -> Keeper {
        let files = self.0.lock().unwrap();
        Keeper(Mutex::new(files.iter().map(|(key, file)| (*key, file.try_clone().unwrap())).collect()))
    }
}

impl KeptFiles for Keeper {
    fn keep_file(&self, key: KeptFileKey, file: BorrowedFd<'_>) {
        self.0.lock().unwrap().insert(key, file.try_clone_to_owned().unwrap());
    }

    fn drop_file(&self, key: KeptFileKey) {
        self.0.lock().unwrap().remove(&key);
    }

    fn take_file(&self, key: KeptFileKey) -> Option<OwnedFd> {
        self.0.lock().unwrap().get(&key).map(|file| file.try_clone().unwrap())
    }

    fn drop_untaken(&self) {}
}

/// A bucket, and the processes of a mount that changes it.
struct KeptRig {
    server: S3Server,
    proxy: ChaosProxy,
    keeper: Arc<Keeper>,
    options: BucketWriteOptions,
    timeout: Duration,
    /// Of all processes.
    stats: Arc<Stats>,
}

impl KeptRig {
    fn new() -> KeptRig {
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("bucket");
        let proxy = ChaosProxy::start(server.address()).unwrap();
        let mut options = BucketWriteOptions::new(0, 0);
        options.object_attrs = true;
        KeptRig {
            server,
            proxy,
            keeper: Arc::default(),
            options,
            timeout: Duration::from_secs(20),
            stats: Arc::default(),
        }
    }

    fn start_process(&self) -> Arc<WritableBucket> {
        let config = OriginOptions {
            endpoint: Some(self.proxy.endpoint()),
            credentials: Some(AwsCredentials {
                access_key_id: ACCESS_KEY.into(),
                secret_access_key: SECRET_KEY.into(),
                session_token: None,
            }),
            env: EnvironmentSource::fixed([]),
            timeout: self.timeout,
            ..OriginOptions::default()
        };
        let stats = Arc::clone(&self.stats);
        let reads = Arc::new(PlainReads(open(URL, &config, Arc::clone(&stats)).unwrap()));
        let published = Arc::new(PublishedBytes::default());
        let process = WritableBucket::open(URL, &config, self.options.clone(), reads, published, stats).unwrap();
        process.hand_over().unwrap().keep(Arc::clone(&self.keeper) as _);
        process
    }

    fn count_puts(&self) -> u64 {
        self.stats.object.put_ops.get()
    }

    fn object(&self, key: &str) -> Option<Vec<u8>> {
        self.server.bytes("bucket", key)
    }

    /// The log of the file without the last lines, as a process leaves the log that ends before these.
    fn log_before(&self, file: &dyn WritableFile, lines: usize) -> OwnedFd {
        let OpenHold::Descriptor(log) = file.hold() else { panic!("the file has a log") };
        let log = File::from(log.try_clone_to_owned().unwrap());
        let mut bytes = vec![0; (log.metadata().unwrap().len() - FIRST_LINE) as usize];
        log.read_exact_at(&mut bytes, FIRST_LINE).unwrap();
        let all: Vec<&[u8]> = bytes.split_inclusive(|byte| *byte == b'\n').collect();
        log_of(&all[..all.len() - lines].concat())
    }

    /// Whether the log has an upload of the file.
    fn has_upload(&self, file: &dyn WritableFile) -> bool {
        let log = File::from(self.log_before(file, 0));
        let mut lines = vec![0; (log.metadata().unwrap().len() - FIRST_LINE) as usize];
        log.read_exact_at(&mut lines, FIRST_LINE).unwrap();
        String::from_utf8(lines).unwrap().contains("{\"Upload\"")
    }

    /// The next process, with the file of this log.
    fn continue_file(&self, log: OwnedFd) -> Box<dyn WritableFile> {
        adopt(&self.start_process(), log).unwrap()
    }
}

fn adopt(process: &WritableBucket, log: OwnedFd) -> Result<Box<dyn WritableFile>> {
    let hold = OpenHold::Descriptor(log);
    let left = LeftOpen { at: root(), flags: libc::O_RDWR as u32, caller: &Caller::default(), hold };
    process.hand_over().unwrap().adopt(left)
}

fn memory_file() -> File {
    File::from(rustix::fs::memfd_create("kept", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
}

/// A log of these lines, the first of which is a state.
fn log_of(lines: &[u8]) -> OwnedFd {
    let log = memory_file();
    log.write_all_at(&FIRST_LINE.to_le_bytes(), 0).unwrap();
    log.write_all_at(lines, FIRST_LINE).unwrap();
    log.into()
}

fn root() -> NodePath<'static> {
    NodePath { path: b"", expected: None::<FileIdentity> }
}

fn create(process: &WritableBucket, name: &[u8]) -> Box<dyn WritableFile> {
    let at = NamePath { directory: root(), name };
    let flags = (libc::O_RDWR | libc::O_CREAT | libc::O_EXCL) as u32;
    process.create(at, flags, 0o644, &Caller::default()).unwrap().file
}

fn write(file: &dyn WritableFile, at: u64, bytes: &[u8]) {
    assert_eq!(file.write_placed(WritePlace::Offset, at, bytes, None).unwrap(), bytes.len());
}

/// The process ends: nothing of it is closed.
fn end_process(file: Box<dyn WritableFile>, process: Arc<WritableBucket>) {
    std::mem::forget((file, process));
}

fn eventually(is_true: impl Fn() -> bool) {
    let until = soon();
    while !is_true() {
        assert!(std::time::Instant::now() < until);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn changes_that_were_not_published_are_published_by_the_next_process() {
    for len in [0, 10, 300_000, 20 << 20] {
        let rig = KeptRig::new();
        let process = rig.start_process();
        let file = create(&process, b"f");
        let text = pattern(len, 7);
        for (number, piece) in text.chunks(1 << 20).enumerate() {
            write(&*file, (number << 20) as u64, piece);
        }
        // The upload begins beside the writes.
        eventually(|| len < PART || rig.has_upload(&*file));
        let log = rig.log_before(&*file, 0);
        end_process(file, process);
        assert!(rig.object("f").is_none());
        let file = rig.continue_file(log);
        assert_eq!(file.stat().unwrap().size, len as u64);
        let mut found = vec![0; len];
        assert_eq!(file.read_at(0, &mut found).unwrap(), len);
        assert!(found == text);
        file.flush().unwrap();
        assert!(rig.object("f").unwrap() == text);
        drop(file);
        // The upload of the process that has ended, too.
        eventually(|| rig.server.open_uploads() == 0);
    }
}

#[test]
fn a_publication_without_a_record_is_made_once() {
    for len in [10, 20 << 20] {
        let rig = KeptRig::new();
        let process = rig.start_process();
        let file = create(&process, b"f");
        let text = pattern(len, 3);
        write(&*file, 0, &text);
        let bytes = rig.keeper.copy();
        file.flush().unwrap();
        let identity = file.stat().unwrap().identity;
        let log = rig.log_before(&*file, 1);
        end_process(file, process);
        // The keeper has what it had before the publication.
        let rig = KeptRig { keeper: Arc::new(bytes), ..rig };
        let file = rig.continue_file(log);
        let puts = rig.count_puts();
        file.flush().unwrap();
        assert_eq!(file.stat().unwrap().identity, identity, "{len} bytes");
        assert_eq!(rig.count_puts(), puts, "{len} bytes");
        // Bytes that come later are published all the same.
        write(&*file, 2, b"later");
        file.flush().unwrap();
        let mut want = text;
        want[2..7].copy_from_slice(b"later");
        assert!(rig.object("f").unwrap() == want, "{len} bytes");
    }
}

#[test]
fn bytes_that_were_written_after_a_publication_without_a_record_are_not_taken_for_published() {
    let rig = KeptRig::new();
    let process = rig.start_process();
    let file = create(&process, b"f");
    write(&*file, 0, b"one two three");
    let bytes = rig.keeper.copy();
    file.flush().unwrap();
    let log = rig.log_before(&*file, 1);
    end_process(file, process);
    let rig = KeptRig { keeper: Arc::new(bytes), ..rig };
    let file = rig.continue_file(log);
    write(&*file, 4, b"TWO");
    file.flush().unwrap();
    assert_eq!(rig.object("f").unwrap(), b"one TWO three");
}

#[test]
fn attributes_that_were_stored_without_a_record_are_set_again() {
    let rig = KeptRig::new();
    let process = rig.start_process();
    let file = create(&process, b"f");
    write(&*file, 0, b"bytes");
    file.flush().unwrap();
    let set = AttrChange { mode: Some(0o600), ..AttrChange::default() };
    file.set_attr(&set, &Caller::default()).unwrap();
    // The state after the copy, and that of the end of the call.
    let log = rig.log_before(&*file, 2);
    end_process(file, process);
    let file = rig.continue_file(log);
    let attr = file.set_attr(&set, &Caller::default()).unwrap();
    assert_eq!(attr.mode & 0o777, 0o600);
    write(&*file, 5, b" more");
    file.flush().unwrap();
    assert_eq!(rig.object("f").unwrap(), b"bytes more");
}

#[test]
fn the_object_of_another_writer_stays() {
    let rig = KeptRig::new();
    let process = rig.start_process();
    let file = create(&process, b"f");
    write(&*file, 0, b"ours");
    let log = rig.log_before(&*file, 0);
    end_process(file, process);
    rig.server.put("bucket", "f", b"theirs");
    let file = rig.continue_file(log);
    assert_eq!(file.flush().unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(rig.object("f").unwrap(), b"theirs");
    // The process after the next one knows that as well.
    let log = rig.log_before(&*file, 0);
    std::mem::forget(file);
    let file = rig.continue_file(log);
    assert_eq!(file.write_placed(WritePlace::Offset, 0, b"more", None).unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(file.flush().unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(rig.object("f").unwrap(), b"theirs");
}

/// The program knows that the bytes are not in the store, and may have written something else since.
#[test]
fn changes_whose_failure_was_reported_are_not_published_by_the_end_of_the_file() {
    for len in [10, 20 << 20] {
        for killed in [false, true] {
            let rig = KeptRig::new();
            let process = rig.start_process();
            let file = create(&process, b"f");
            write(&*file, 0, &pattern(len, 3));
            rig.proxy.inject_on(Some("PUT"), "/bucket/f", ProxyFault::Error(403, "AccessDenied", "no"), u32::MAX);
            assert_eq!(file.sync(false).unwrap_err().kind(), ErrorKind::PermissionDenied);
            assert_eq!(file.flush().unwrap_err().kind(), ErrorKind::PermissionDenied);
            rig.proxy.clear_faults();
            if killed {
                let log = rig.log_before(&*file, 0);
                end_process(file, process);
                drop(rig.continue_file(log));
            } else {
                drop(file);
                assert_eq!(process.losses().file_count, 0, "the program knows");
            }
            eventually(|| rig.server.open_uploads() == 0);
            assert!(rig.object("f").is_none(), "{len} bytes, killed {killed}");
            assert_eq!(rig.stats.writes.failures.get(), 1);
        }
    }
}

#[test]
fn changes_whose_failure_was_reported_are_published_by_a_further_close() {
    let rig = KeptRig::new();
    let process = rig.start_process();
    let file = create(&process, b"f");
    write(&*file, 0, b"bytes");
    rig.proxy.inject_on(Some("PUT"), "/bucket/f", ProxyFault::Error(403, "AccessDenied", "no"), 1);
    file.flush().unwrap_err();
    file.flush().unwrap();
    assert_eq!(rig.object("f").unwrap(), b"bytes");
    // A change after a failure that was reported is one that no call has reported.
    write(&*file, 5, b" more");
    rig.proxy.inject_on(Some("PUT"), "/bucket/f", ProxyFault::Error(403, "AccessDenied", "no"), 2);
    file.flush().unwrap_err();
    write(&*file, 10, b" again");
    drop(file);
    assert_eq!(rig.object("f").unwrap(), b"bytes");
    assert_eq!(process.losses().first_files, [("f".to_owned(), 16)]);
    assert_eq!(rig.stats.writes.failures.get(), 3);
}

/// A store that does not answer, or refuses the upload, is found by fsync and close alone.
#[test]
fn writes_do_not_wait_for_the_store() {
    for fault in [ProxyFault::Stall, ProxyFault::Error(403, "AccessDenied", "no")] {
        let rig = KeptRig::new();
        let process = rig.start_process();
        let file = create(&process, b"f");
        rig.proxy.inject_on(Some("POST"), "uploads", fault, u32::MAX);
        let text = pattern(10 * PART + 5, 3);
        let begun = std::time::Instant::now();
        for (number, piece) in text.chunks(1 << 20).enumerate() {
            write(&*file, (number << 20) as u64, piece);
        }
        assert!(begun.elapsed() < rig.timeout);
        rig.proxy.clear_faults();
        // Stalled connections end.
        rig.proxy.refuse_connections(true);
        rig.proxy.refuse_connections(false);
        file.flush().unwrap();
        assert!(rig.object("f").unwrap() == text);
        drop(file);
        eventually(|| rig.server.open_uploads() == 0);
    }
}

#[test]
fn a_close_after_a_timeout_does_not_wait_again() {
    for len in [10, 2 * PART] {
        let rig = KeptRig { timeout: Duration::from_secs(1), ..KeptRig::new() };
        let process = rig.start_process();
        let file = create(&process, b"f");
        let methods = ["PUT", "POST"];
        methods.iter().for_each(|method| rig.proxy.inject_on(Some(method), "/bucket/f", ProxyFault::Stall, u32::MAX));
        write(&*file, 0, &pattern(len, 3));
        let failed = file.sync(false).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Timeout);
        let sent = methods.map(|method| rig.proxy.count_requests(method, "/bucket/f"));
        assert_eq!(file.flush().unwrap_err(), failed);
        assert_eq!(methods.map(|method| rig.proxy.count_requests(method, "/bucket/f")), sent);
        rig.proxy.clear_faults();
        file.sync(false).unwrap();
        assert!(rig.object("f").is_some());
    }
}

#[test]
fn a_removed_file_stays_removed() {
    let rig = KeptRig::new();
    let process = rig.start_process();
    let file = create(&process, b"f");
    write(&*file, 0, b"bytes");
    process.change(&Change::Unlink { at: NamePath { directory: root(), name: b"f" } }, &Caller::default()).unwrap();
    let log = rig.log_before(&*file, 0);
    end_process(file, process);
    let file = rig.continue_file(log);
    write(&*file, 5, b" more");
    let mut found = [0; 10];
    assert_eq!(file.read_at(0, &mut found).unwrap(), 10);
    assert_eq!(&found, b"bytes more");
    assert_eq!(file.stat().unwrap().nlink, 0);
    file.flush().unwrap();
    drop(file);
    assert!(rig.object("f").is_none());
}

#[test]
fn a_file_without_its_bytes_is_refused() {
    let rig = KeptRig::new();
    let process = rig.start_process();
    let file = create(&process, b"f");
    write(&*file, 0, b"bytes");
    let log = rig.log_before(&*file, 0);
    end_process(file, process);
    rig.keeper.0.lock().unwrap().clear();
    let refused = adopt(&rig.start_process(), log).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Corrupt);
}

/// The logs that releases write of a new file in which [`RECORDED_BYTES`] are written and published, by the version of the state: the
/// latest, and the one before.
const RECORDED_LOGS: [&str; 1] = [include_str!("kept_logs/v4")];
const RECORDED_BYTES: &[u8] = b"one two three";

/// A line with all values of a kind alike.
fn form_of(value: &Value) -> Value {
    match value {
        Value::Null => Value::Null,
        Value::Bool(_) => Value::Bool(false),
        Value::Number(_) => Value::from(0),
        Value::String(_) => Value::from(""),
        Value::Array(values) => values.iter().take(1).map(form_of).collect(),
        Value::Object(values) => values.iter().map(|(key, value)| (key.clone(), form_of(value))).collect(),
    }
}

fn forms_of(log: &str) -> Vec<Value> {
    log.lines().map(|line| form_of(&serde_json::from_str(line).unwrap())).collect()
}

#[test]
fn another_form_of_the_log_has_another_version() {
    let rig = KeptRig::new();
    let process = rig.start_process();
    let file = create(&process, b"f");
    write(&*file, 0, RECORDED_BYTES);
    file.flush().unwrap();
    let log = File::from(rig.log_before(&*file, 0));
    let mut lines = vec![0; (log.metadata().unwrap().len() - FIRST_LINE) as usize];
    log.read_exact_at(&mut lines, FIRST_LINE).unwrap();
    let lines = String::from_utf8(lines).unwrap();
    let recorded = RECORDED_LOGS[RECORDED_LOGS.len() - 1];
    assert!(
        forms_of(&lines) == forms_of(recorded),
        "the log of an open file has another form than before: give new names defaults, give the state of a mount another version \
         (fuse/kept_state), and keep this as a further record of kept_logs:\n{lines}"
    );
}

#[test]
fn logs_of_this_release_and_the_one_before_are_continued() {
    for recorded in RECORDED_LOGS {
        let rig = KeptRig::new();
        let first: Value = serde_json::from_str(recorded.lines().next().unwrap()).unwrap();
        let identity: [u8; FileIdentity::LEN] = serde_json::from_value(first["State"]["identity"].clone()).unwrap();
        let number = u64::from_be_bytes(identity[..8].try_into().unwrap());
        let bytes = memory_file();
        bytes.write_all_at(RECORDED_BYTES, 0).unwrap();
        rig.keeper.keep_file(KeptFileKey::ChangedBytes(number), bytes.as_fd());
        // The process has ended before the publication.
        let lines = recorded.split_inclusive('\n').take_while(|line| !line.contains("Sending"));
        let file = rig.continue_file(log_of(lines.collect::<String>().as_bytes()));
        write(&*file, 4, b"TWO");
        file.flush().unwrap();
        assert_eq!(rig.object("f").unwrap(), b"one TWO three");
    }
}
