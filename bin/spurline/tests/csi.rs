//! The CSI driver with real mounts: volumes over their life, restarts, dead and hung processes, bad input. Mount
//! processes run on this host; what pods would do, directories and processes do here.

use spurline_csi::pb;
use spurline_rig::driver::{DriverRig, capability, capability_of, pair};
use spurline_rig::program::wait_for;
use spurline_testkit::{ACCESS_KEY, S3Server, SECRET_KEY};
use std::collections::HashMap;
use std::fs::TryLockError;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use tonic::Code;

#[test]
fn a_volume_is_shared_by_the_pods_of_a_node_and_leaves_nothing() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    let early = rig.publish("pv", "a", &attributes).unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition, "{early}");
    for _ in 0..2 {
        rig.stage("pv", &attributes).unwrap();
    }
    for pod in ["a", "b", "a"] {
        rig.publish("pv", pod, &attributes).unwrap();
    }
    assert_eq!(
        (rig.read("a").unwrap(), rig.read("b").unwrap()),
        (b"hello from the source".into(), b"hello from the source".into())
    );
    assert_eq!(rig.launched().len(), 1);
    let condition = rig.condition("pv", "a").unwrap();
    assert!(!condition.abnormal && condition.message.contains("mounted"), "{condition:?}");
    assert_eq!(rig.condition("pv", "nowhere").unwrap_err().code(), Code::NotFound);
    // Other options need another mount.
    let mut other = attributes.clone();
    other.insert("mountOptions".into(), "cache-size=0,metrics=none,file-mode=555".into());
    assert_eq!(rig.stage("pv", &other).unwrap_err().code(), Code::AlreadyExists);
    for _ in 0..2 {
        rig.unpublish("pv", "a").unwrap();
    }
    assert!(!rig.target("a").exists());
    assert!(rig.read("b").is_ok());
    rig.unpublish("pv", "b").unwrap();
    for _ in 0..2 {
        rig.unstage("pv").unwrap();
    }
    rig.check_empty();
}

#[test]
fn a_volume_with_rw_changes_its_source_but_not_for_pods_that_only_read() {
    use pb::volume_capability::access_mode::Mode;
    let Some(rig) = DriverRig::new() else { return };
    let mut attributes = rig.attributes();
    attributes.insert("mountOptions".into(), "cache-size=0,metrics=none,rw".into());
    // A claim that only reads contradicts the option, and so does a bucket.
    let error = rig.stage("pv", &attributes).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("[ReadWriteMany]"), "{error}");
    let many = || capability_of(Mode::MultiNodeMultiWriter);
    let bucket = attributes.clone().into_iter().chain([pair(("source", "gs://bucket"))]).collect();
    let error = rig.stage_as("pv", &bucket, many()).unwrap_err();
    assert!(error.message().contains("gs://bucket is neither a directory nor an S3 bucket"), "{error}");
    rig.check_empty();

    rig.stage_as("pv", &attributes, many()).unwrap();
    rig.publish_as("pv", "writer", &attributes, many(), false).unwrap();
    rig.publish_as("pv", "reader", &attributes, many(), true).unwrap();
    std::fs::write(rig.target("writer").join("new"), b"written").unwrap();
    assert_eq!(std::fs::read(rig.path("src/new")).unwrap(), b"written");
    wait_for("the new file", || std::fs::read(rig.target("reader").join("new")).is_ok_and(|text| text == b"written"));
    let refused = std::fs::write(rig.target("reader").join("other"), b"x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    // It stays so when the mount process is replaced.
    rig.kill_mounts();
    wait_for("the replaced mount", || rig.read("writer").is_ok() && rig.read("reader").is_ok());
    std::fs::write(rig.target("writer").join("new"), b"again").unwrap();
    let refused = std::fs::write(rig.target("reader").join("other"), b"x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    for pod in ["writer", "reader"] {
        rig.unpublish("pv", pod).unwrap();
    }
    rig.unstage("pv").unwrap();
    rig.check_empty();
    assert_eq!(std::fs::read(rig.path("src/new")).unwrap(), b"again");
    // Without the option, claims of any mode are mounted for reading.
    rig.stage_as("pv", &rig.attributes(), many()).unwrap();
    rig.publish_as("pv", "writer", &rig.attributes(), many(), false).unwrap();
    assert!(std::fs::write(rig.target("writer").join("new"), b"x").is_err());
    rig.unpublish("pv", "writer").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

/// A volume of a bucket that pods of several nodes change, staged; returns its attributes.
fn stage_bucket(rig: &DriverRig, server: &S3Server) -> HashMap<String, String> {
    server.create_bucket("bucket");
    let options = format!("endpoint-url={},cache-size=0,metrics=none,rw", server.endpoint());
    let attributes: HashMap<_, _> = [("source", "s3://bucket/p"), ("mountOptions", &options)].map(pair).into();
    let request = pb::NodeStageVolumeRequest {
        volume_id: "pv".into(),
        staging_target_path: rig.path("staging-pv").display().to_string(),
        volume_capability: Some(written_by_many()),
        volume_context: attributes.clone(),
        secrets: [("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)].map(pair).into(),
        ..Default::default()
    };
    rig.runtime.block_on(rig.client().node_stage_volume(request)).unwrap();
    attributes
}

fn written_by_many() -> pb::VolumeCapability {
    capability_of(pb::volume_capability::access_mode::Mode::MultiNodeMultiWriter)
}

/// A file that a pod closes is an object, and one of another program is a file of the pod.
#[test]
fn a_volume_of_a_bucket_is_written_by_a_pod() {
    let Some(rig) = DriverRig::new() else { return };
    let server = S3Server::in_memory().unwrap();
    let attributes = stage_bucket(&rig, &server);
    server.put("bucket", "p/old", b"of others");
    rig.publish_as("pv", "writer", &attributes, written_by_many(), false).unwrap();
    assert_eq!(std::fs::read(rig.target("writer").join("old")).unwrap(), b"of others");
    std::fs::write(rig.target("writer").join("new"), b"written").unwrap();
    assert_eq!(server.bytes("bucket", "p/new").unwrap(), b"written");
    rig.unpublish("pv", "writer").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

#[test]
fn flags_of_the_driver_come_from_variables_and_a_toml_file() {
    let dir = spurline_rig::program::tempdir();
    let toml = dir.path().join("spurline.toml");
    std::fs::write(&toml, "node-id = \"n\"\n[csi-driver]\nlauncher = \"process\"\nendpoint = \"csi.sock\"\n").unwrap();
    let refused = |variable: Option<&str>| {
        let mut command = spurline_rig::program::spurline();
        command.args(["k8s", "csi-driver", "--state-dir"]).arg(dir.path().join("state")).arg("--config").arg(&toml);
        command.envs(variable.map(|value| ("SPURLINE_ENDPOINT", value)));
        let out = command.output().unwrap();
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, said) = refused(None);
    assert!(code == Some(2) && said.contains("--endpoint csi.sock names no absolute path"), "{said}");
    let (code, said) = refused(Some("other.sock"));
    assert!(code == Some(2) && said.contains("--endpoint other.sock"), "{said}");
    let (code, said) = refused(Some("/nowhere/at/all/csi.sock"));
    assert!(code == Some(3) && said.contains("/nowhere/at/all/csi.sock") && said.contains("fix: "), "{said}");
    std::fs::write(&toml, "[csi-driver]\nlauncer = \"pod\"\n").unwrap();
    let (code, said) = refused(None);
    assert!(code == Some(2) && said.contains("csi-driver.launcer") && said.contains("'launcher'"), "{said}");
}

#[test]
fn an_inline_volume_lives_as_long_as_its_pod() {
    let Some(rig) = DriverRig::new() else { return };
    let mut attributes = rig.attributes();
    attributes.insert("csi.storage.k8s.io/ephemeral".into(), "true".into());
    rig.publish("csi-1", "a", &attributes).unwrap();
    assert!(rig.read("a").is_ok());
    rig.unpublish("csi-1", "a").unwrap();
    rig.check_empty();
}

#[test]
fn inline_volumes_of_strangers_have_no_rights_of_the_node() {
    let rig = DriverRig::with("node-1", |_| (["--launcher", "process"].map(str::to_owned).into(), Vec::new()));
    let mut attributes = rig.attributes();
    let inline = pair(("csi.storage.k8s.io/ephemeral", "true"));
    attributes.insert(inline.0, inline.1);
    attributes.insert("mountOptions".into(), "cache-size=0".into());
    for (more, says) in [
        (pair(("source", &rig.path("src").display().to_string())), "as its source"),
        (pair(("source", "s3://bucket")), "has no keys"),
        (pair(("mountOptions", "access-log=/etc/spurline-test")), "the mount option access-log"),
    ] {
        attributes.insert(more.0, more.1);
        let error = rig.publish("csi-1", "a", &attributes).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(says) && error.message().contains("PersistentVolume"), "{error}");
    }
    rig.check_empty();
}

#[test]
fn a_restarted_driver_finds_its_mounts_and_readers_see_nothing_of_it() {
    let Some(mut rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    let process = rig.processes();
    let reader = {
        use std::os::unix::fs::FileExt as _;
        let file = std::fs::File::open(rig.target("a").join("file")).unwrap();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let reads = std::thread::spawn(move || {
            let mut count = 0;
            while stopped.try_recv().is_err() {
                let mut text = [0; 21];
                file.read_exact_at(&mut text, 0).unwrap();
                assert_eq!(&text, b"hello from the source");
                count += 1;
            }
            count
        });
        (stop, reads)
    };
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::KILL] {
        let inner = Arc::get_mut(&mut rig).unwrap();
        inner.end_driver(signal);
        inner.start();
    }
    assert_eq!(rig.processes(), process);
    rig.publish("pv", "b", &attributes).unwrap();
    assert!(rig.read("b").is_ok());
    reader.0.send(()).unwrap();
    assert!(reader.1.join().unwrap() > 0);
    for pod in ["a", "b"] {
        rig.unpublish("pv", pod).unwrap();
    }
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

#[test]
fn a_dead_mount_process_is_replaced_and_the_cause_reported() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = without_recovery(&rig);
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    let before = rig.processes();
    rig.signal(before[0], rustix::process::Signal::KILL);
    wait_for("the replaced mount", || rig.read("a").is_ok());
    assert_ne!(rig.processes(), before);
    wait_for("the condition", || {
        rig.condition("pv", "a").is_ok_and(|now| !now.abnormal && now.message.contains("signal: 9"))
    });
    let log = std::fs::read_to_string(rig.path("driver.log")).unwrap();
    assert!(log.contains("VolumeMountEnded") && log.contains("VolumeMountReplaced"), "{log}");
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

/// The attributes of a volume whose mount ends with its process.
fn without_recovery(rig: &DriverRig) -> HashMap<String, String> {
    let mut attributes = rig.attributes();
    attributes.insert("mountOptions".into(), "cache-size=0,metrics=none,norecover".into());
    attributes
}

/// A call for another pod, or the next driver, can be the first to see that a mount is dead.
#[test]
fn every_pod_gets_a_mount_that_any_call_has_replaced() {
    let Some(mut rig) = DriverRig::new() else { return };
    let attributes = without_recovery(&rig);
    for way in ["publish", "stage", "watch"] {
        rig.stage("pv", &attributes).unwrap();
        rig.publish("pv", "a", &attributes).unwrap();
        let written = std::fs::read_to_string(rig.path("driver.log")).unwrap().len();
        // No watch sees the end.
        let inner = Arc::get_mut(&mut rig).unwrap();
        inner.end_driver(rustix::process::Signal::KILL);
        rig.kill_mounts();
        wait_for("the end", || rig.processes().is_empty());
        Arc::get_mut(&mut rig).unwrap().start();
        match way {
            "publish" => rig.publish("pv", "b", &attributes).unwrap(),
            "stage" => rig.stage("pv", &attributes).unwrap(),
            _ => {}
        }
        wait_for("the mount of the first pod", || rig.read("a").is_ok());
        let said = "its process was replaced because";
        wait_for("the condition", || {
            rig.condition("pv", "a").is_ok_and(|now| !now.abnormal && now.message.contains(said))
        });
        let log = std::fs::read_to_string(rig.path("driver.log")).unwrap();
        for event in ["VolumeMountEnded: ", "VolumeMountReplaced: "] {
            assert_eq!(log[written..].matches(event).count(), 1, "{way}: {log}");
        }
        if way == "publish" {
            assert!(rig.read("b").is_ok());
            rig.unpublish("pv", "b").unwrap();
        }
        rig.unpublish("pv", "a").unwrap();
        rig.unstage("pv").unwrap();
        rig.check_empty();
    }
}

/// A driver that ended between two binds, or a bind that failed, leaves a directory without the mount of the others.
#[test]
fn a_directory_without_the_mount_is_named_and_gets_it() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = without_recovery(&rig);
    rig.stage("pv", &attributes).unwrap();
    for pod in ["a", "b"] {
        rig.publish("pv", pod, &attributes).unwrap();
    }
    let process = rig.processes();
    let target = rig.target("a");
    // A file in the place of the directory, until the driver has tried.
    let driver = i32::try_from(rig.pid()).unwrap();
    rig.signal(driver, rustix::process::Signal::STOP);
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::DETACH).unwrap();
    std::fs::remove_dir_all(&target).unwrap();
    std::fs::write(&target, b"no directory").unwrap();
    rig.signal(driver, rustix::process::Signal::CONT);
    let named = target.display().to_string();
    wait_for("the condition", || {
        rig.condition("pv", "a").is_ok_and(|now| now.abnormal && now.message.contains(&named))
    });
    assert!(!rig.condition("pv", "b").unwrap().abnormal && rig.read("b").is_ok());
    std::fs::remove_file(&target).unwrap();
    wait_for("the directory's mount", || rig.read("a").is_ok());
    wait_for("the condition", || rig.condition("pv", "a").is_ok_and(|now| !now.abnormal));
    assert_eq!(rig.processes(), process, "no other process");
    for pod in ["a", "b"] {
        rig.unpublish("pv", pod).unwrap();
    }
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

/// Reads an open file from the mount, not from the kernel's cache.
fn read_again(file: &std::fs::File) -> Vec<u8> {
    use std::os::unix::fs::FileExt as _;
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut text = vec![0; 21];
    file.read_exact_at(&mut text, 0).unwrap();
    text
}

#[test]
fn open_files_of_pods_outlive_the_processes_of_their_mount_and_of_the_driver() {
    use rustix::process::Signal;
    let Some(mut rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    let file = std::fs::File::open(rig.target("a").join("file")).unwrap();
    let device = std::fs::metadata(rig.target("a")).unwrap().dev();
    let events = |rig: &DriverRig, reason: &str| {
        std::fs::read_to_string(rig.path("driver.log")).unwrap().matches(&format!("{reason}: ")).count()
    };
    let check = |rig: &DriverRig| {
        assert_eq!(read_again(&file), b"hello from the source");
        assert_eq!(std::fs::metadata(rig.target("a")).unwrap().dev(), device, "it is the same mount");
        assert_eq!(rig.launched().len(), 1);
    };

    // The keeper replaces the process.
    let keeper = rig.launched();
    rig.signal(rig.servers()[0], Signal::KILL);
    wait_for("the event", || events(&rig, "VolumeMountRestarted") == 1);
    check(&rig);
    assert_eq!(rig.launched(), keeper);
    let wanted = "its process ended: signal: 9";
    wait_for("the condition", || {
        rig.condition("pv", "a").is_ok_and(|now| !now.abnormal && now.message.contains(wanted))
    });

    // The driver replaces both, as after the end of a container, also after an end of the driver.
    for round in 1..=2 {
        rig.kill_mounts();
        wait_for("the event", || events(&rig, "VolumeMountReplaced") == round);
        check(&rig);
        let inner = Arc::get_mut(&mut rig).unwrap();
        inner.end_driver(if round == 1 { Signal::KILL } else { Signal::TERM });
        inner.start();
        let connects = "the keeper connects to the restarted driver";
        let keeper = rig.launched()[0];
        wait_for(connects, || has_store(keeper, &rig.path("state")));
    }
    // A pod that is deleted gets a signal.
    let keeper = rig.launched();
    rig.signal(keeper[0], Signal::TERM);
    wait_for("the event", || events(&rig, "VolumeMountReplaced") == 3);
    check(&rig);
    assert_ne!(rig.launched(), keeper);
    assert_eq!(events(&rig, "VolumeMountRestarted"), 1, "each end is reported once");

    // An open file does not keep the volume.
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
    drop(file);
}

/// A node that takes changes of the rig's source, and the registry of the node.
fn start_node(rig: &DriverRig) -> (Child, String) {
    let log = rig.path("node.log");
    let mut command = spurline_rig::program::spurline();
    command.args(["node", "--writable", "--group-port", "0", "--metrics", "none", "--cache-size", "0", "--source"]);
    command.arg(rig.path("src")).stderr(std::fs::File::create(&log).unwrap());
    let node = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let address = || {
        let text = std::fs::read_to_string(&log).unwrap();
        let line = text.lines().find(|line| line.contains("over tcp"))?;
        line.split("serving on ").nth(1)?.split(' ').next().map(str::to_owned)
    };
    wait_for("the node", || address().is_some());
    (node, format!("static:{}", address().unwrap()))
}

/// A log in a volume that pods write, open and locked.
struct LockedLog {
    file: std::fs::File,
    path: PathBuf,
    device: u64,
    written: String,
}

impl LockedLog {
    /// In a new volume with more attributes than those of the rig.
    fn open(rig: &DriverRig, more: &[(&str, String)]) -> LockedLog {
        let mut attributes = rig.attributes();
        attributes.insert("mountOptions".into(), "cache-size=0,metrics=none,rw".into());
        attributes.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        rig.stage_as("pv", &attributes, written_by_many()).unwrap();
        LockedLog::open_in(rig, &attributes)
    }

    /// In a staged volume with these attributes.
    fn open_in(rig: &DriverRig, attributes: &HashMap<String, String>) -> LockedLog {
        rig.publish_as("pv", "a", attributes, written_by_many(), false).unwrap();
        let path = rig.target("a").join("log");
        let file = std::fs::File::options().create(true).append(true).open(&path).unwrap();
        let device = file.metadata().unwrap().dev();
        file.lock().unwrap();
        LockedLog { file, path, device, written: String::new() }
    }

    fn write(&mut self, round: u32) {
        let line = format!("line {round}\n");
        self.file.write_all(line.as_bytes()).unwrap();
        self.written.push_str(&line);
    }

    fn check(&self) {
        self.file.sync_all().unwrap();
        assert_eq!(std::fs::read_to_string(&self.path).unwrap(), self.written);
        let other = std::fs::File::open(&self.path).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)), "the lock stays");
    }

    fn check_mount(&self) {
        assert_eq!(std::fs::metadata(&self.path).unwrap().dev(), self.device, "it is the same mount");
    }
}

fn end_volume(rig: &DriverRig) {
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

/// Writes while the mount's process, its keeper, the whole mount pod and the driver end.
fn write_beside_ends(rig: &mut Arc<DriverRig>, log: &mut LockedLog) {
    use rustix::process::Signal;
    for round in 0..5 {
        log.write(round);
        let keeper = rig.launched();
        match round {
            0 => rig.signal(rig.servers()[0], Signal::KILL),
            // As after the end of a container.
            1 => rig.kill_mounts(),
            2 => {
                let inner = Arc::get_mut(rig).unwrap();
                inner.end_driver(Signal::KILL);
                inner.start();
                wait_for("the keeper connects to the restarted driver", || has_store(keeper[0], &rig.path("state")));
                // The descriptors follow the connection.
                std::thread::sleep(std::time::Duration::from_secs(1));
                rig.kill_mounts();
            }
            // A pod that is deleted gets a signal.
            3 => {
                let noticed = format!("is mounted by {}:", keeper[0]);
                wait_for("the driver notices the last pod", || {
                    std::fs::read_to_string(rig.path("driver.log")).unwrap().contains(&noticed)
                });
                rig.signal(keeper[0], Signal::TERM);
                wait_for("the next keeper", || rig.launched().len() == 1 && rig.launched() != keeper);
            }
            _ => {}
        }
        log.check();
        if round == 0 {
            assert_eq!(rig.launched(), keeper, "the keeper has replaced the process");
        }
    }
    log.check_mount();
}

#[test]
fn writers_through_nodes_outlive_the_processes_of_their_mount_and_of_the_driver() {
    let Some(mut rig) = DriverRig::new() else { return };
    let (mut node, registry) = start_node(&rig);
    let mut log = LockedLog::open(&rig, &[("registry", registry)]);
    write_beside_ends(&mut rig, &mut log);
    assert_eq!(std::fs::read_to_string(rig.path("src/log")).unwrap(), log.written);
    drop(log);
    end_volume(&rig);
    node.kill().unwrap();
    node.wait().unwrap();
}

/// Without nodes, the driver holds the open files for the next mount pod.
#[test]
fn writers_of_a_directory_outlive_the_processes_of_their_mount_and_of_the_driver() {
    let Some(mut rig) = DriverRig::new() else { return };
    let mut log = LockedLog::open(&rig, &[]);
    write_beside_ends(&mut rig, &mut log);
    assert_eq!(std::fs::read_to_string(rig.path("src/log")).unwrap(), log.written);
    drop(log);
    end_volume(&rig);
}

#[test]
fn writers_of_a_bucket_outlive_the_processes_of_their_mount_and_of_the_driver() {
    let Some(mut rig) = DriverRig::new() else { return };
    let server = S3Server::in_memory().unwrap();
    let attributes = stage_bucket(&rig, &server);
    let mut log = LockedLog::open_in(&rig, &attributes);
    write_beside_ends(&mut rig, &mut log);
    assert_eq!(server.bytes("bucket", "p/log").unwrap(), log.written.as_bytes());
    drop(log);
    end_volume(&rig);
    assert_eq!(server.open_uploads(), 0);
}

/// Whether the keeper is connected to a descriptor store below `dir`.
fn has_store(keeper: i32, dir: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    // The accepted end of a connection has the path of the listener; 03 is "connected".
    let dir = dir.display().to_string();
    let accepted = table.lines().filter(|line| line.contains(&dir) && line.ends_with("/store"));
    let is_connected = |line: &str| line.split_whitespace().nth(5) == Some("03");
    Path::new(&format!("/proc/{keeper}")).exists() && accepted.filter(|line| is_connected(line)).count() == 1
}

/// Runs a script with root's rights.
fn sh(script: &str) -> std::process::Output {
    std::process::Command::new("sh").args(["-ec", script]).output().unwrap()
}

/// A container has a copy of the volume's mount, and gets each mount that is made on that one: with `HostToContainer` it is a slave
/// of it. So every further mount has to be made over the dead one, and over no other pod's.
#[test]
fn containers_of_a_volume_get_each_replacement() {
    use pb::volume_capability::access_mode::Mode;
    let Some(rig) = DriverRig::new() else { return };
    let mut attributes = rig.attributes();
    attributes.insert("mountOptions".into(), "cache-size=0,metrics=none,rw,norecover".into());
    let many = || capability_of(Mode::MultiNodeMultiWriter);
    // As kubelet's directory and that of the driver are on most hosts.
    let shared = ["pods", "state"].map(|name| rig.path(name).display().to_string());
    for dir in &shared {
        let out = sh(&format!("mkdir -p {dir}; mount --bind {dir} {dir}; mount --make-shared {dir}"));
        assert!(out.status.success(), "{out:?}");
    }
    rig.stage_as("pv", &attributes, many()).unwrap();
    rig.publish_as("pv", "writer", &attributes, many(), false).unwrap();
    rig.publish_as("pv", "reader", &attributes, many(), true).unwrap();
    let volume = rig.path("container").display().to_string();
    let start_container = |pod: &str| {
        let script = format!(
            "mkdir -p {volume}; mount --rbind {target} {volume}; mount --make-rslave {volume}; echo started; exec sleep 600",
            target = rig.target(pod).display()
        );
        let mut command = std::process::Command::new("unshare");
        command.args(["--mount", "--propagation", "unchanged", "sh", "-ec", &script]);
        let mut container = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = [0; 8];
        std::io::Read::read_exact(container.stdout.as_mut().unwrap(), &mut line).unwrap();
        container
    };
    let in_container = |id: u32, script: &str| sh(&format!("nsenter -t {id} -m sh -ec 'cd {volume}; {script}'"));
    let mut containers = ["writer", "reader"].map(|pod| vec![start_container(pod)]);
    for _ in 0..3 {
        rig.signal(rig.processes()[0], rustix::process::Signal::KILL);
        wait_for("the replaced mounts", || rig.read("writer").is_ok() && rig.read("reader").is_ok());
        for (pod, containers) in ["writer", "reader"].into_iter().zip(&mut containers) {
            // Another container of the pod is started between two ends.
            containers.push(start_container(pod));
            for container in containers {
                let id = container.id();
                wait_for("the container's mount", || in_container(id, "cat file").stdout == b"hello from the source");
                assert_eq!(in_container(id, "echo x >written").status.success(), pod == "writer");
            }
        }
    }
    // The end of one pod takes nothing from the other.
    rig.unpublish("pv", "writer").unwrap();
    assert!(rig.read("reader").is_ok());
    for container in &containers[1] {
        assert_eq!(in_container(container.id(), "cat file").stdout, b"hello from the source");
    }
    for container in containers.iter_mut().flatten() {
        container.kill().unwrap();
        container.wait().unwrap();
    }
    rig.unpublish("pv", "reader").unwrap();
    rig.unstage("pv").unwrap();
    for dir in shared {
        assert!(sh(&format!("umount {dir}")).status.success());
    }
    rig.check_empty();
}

#[test]
fn a_hung_mount_is_reported_and_does_not_hang_its_end() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    rig.signal(rig.servers()[0], rustix::process::Signal::STOP);
    let condition = rig.condition("pv", "a").unwrap();
    assert!(condition.abnormal && condition.message.contains("no answer within"), "{condition:?}");
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

#[test]
fn bad_input_is_refused_with_the_sentence_and_leaves_nothing() {
    let Some(rig) = DriverRig::new() else { return };
    let base = rig.attributes();
    let with = |more: &[(&str, &str)]| {
        let mut attributes = base.clone();
        attributes.extend(more.iter().copied().map(pair));
        attributes
    };
    let none = rig.path("none").display().to_string();
    for (attributes, code, says) in [
        (with(&[("sorce", "x")]), Code::InvalidArgument, "did you mean source?"),
        (with(&[("mountOptions", "cachesize=1G")]), Code::InvalidArgument, "did you mean cache-size?"),
        (with(&[("mountOptions", "buffer-size=1M,cache-size=0")]), Code::InvalidArgument, "is too small"),
        (with(&[("source", "s4://b")]), Code::InvalidArgument, "did you mean s3://?"),
        (with(&[("source", none.as_str())]), Code::FailedPrecondition, "can't be mounted"),
        (with(&[("source", "")]), Code::InvalidArgument, "no attribute 'source'"),
        (with(&[("registry", "static:127.0.0.1:1")]), Code::FailedPrecondition, "127.0.0.1:1"),
    ] {
        let error = rig.stage("pv", &attributes).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(says) && !error.message().contains('\n'), "{error}");
        rig.check_empty();
    }
    let block = pb::NodeStageVolumeRequest {
        volume_id: "pv".into(),
        staging_target_path: "/staging".into(),
        volume_capability: Some(pb::VolumeCapability {
            access_type: Some(pb::volume_capability::AccessType::Block(Default::default())),
            ..Default::default()
        }),
        volume_context: base.clone(),
        ..Default::default()
    };
    let error = rig.runtime.block_on(rig.client().node_stage_volume(block)).unwrap_err();
    assert!(error.message().contains("volumeMode: Block"), "{error}");
    // A secret with a wrong key, whose content is in no message and no log.
    let secret = pb::NodeStageVolumeRequest {
        volume_id: "pv".into(),
        staging_target_path: "/staging".into(),
        volume_capability: Some(capability()),
        volume_context: base,
        secrets: [("AWS_ACCESS_KEY", "hush-hush")].map(pair).into(),
        ..Default::default()
    };
    let error = rig.runtime.block_on(rig.client().node_stage_volume(secret)).unwrap_err();
    assert!(error.message().contains("did you mean AWS_ACCESS_KEY_ID?"), "{error}");
    let log = std::fs::read_to_string(rig.path("driver.log")).unwrap();
    assert!(!error.message().contains("hush") && !log.contains("hush"));
    rig.check_empty();
}

#[test]
fn a_key_that_the_store_refuses_is_named_and_the_right_one_mounts() {
    let Some(rig) = DriverRig::new() else { return };
    let store = rig.path("store");
    std::fs::create_dir_all(store.join("data")).unwrap();
    std::fs::write(store.join("data/file"), "bytes").unwrap();
    let server = spurline_testkit::S3Server::start(&store).unwrap();
    let options = format!("endpoint-url={},cache-size=0,metrics=none", server.endpoint());
    let stage = |secret: &str| {
        let request = pb::NodeStageVolumeRequest {
            volume_id: "pv".into(),
            staging_target_path: "/staging".into(),
            volume_capability: Some(capability()),
            volume_context: [pair(("source", "s3://data")), pair(("mountOptions", &options))].into(),
            secrets: [("AWS_ACCESS_KEY_ID", spurline_testkit::ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", secret)]
                .map(pair)
                .into(),
            ..Default::default()
        };
        rig.runtime.block_on(rig.client().node_stage_volume(request))
    };
    let error = stage("a-wrong-secret").unwrap_err();
    let text = error.message();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(text.contains("s3://data") && text.contains("the secret does not fit the access key"), "{error}");
    assert!(!text.contains("a-wrong-secret") && !text.contains('\n'), "{error}");
    rig.check_empty();
    stage(spurline_testkit::SECRET_KEY).unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

#[test]
fn a_pod_deleted_while_its_mount_starts_ends_the_start() {
    let Some(rig) = DriverRig::new() else { return };
    // A server that accepts and never answers keeps a start waiting.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("endpoint-url=http://{}", silent.local_addr().unwrap());
    let mut attributes: HashMap<_, _> = [
        ("source", "s3://bucket"),
        ("mountOptions", &format!("{endpoint},anonymous,cache-size=0,metrics=none")),
        ("csi.storage.k8s.io/ephemeral", "true"),
    ]
    .map(pair)
    .into();
    let starting = {
        let (rig, attributes) = (Arc::clone(&rig), attributes.clone());
        std::thread::spawn(move || rig.publish("csi-1", "a", &attributes))
    };
    wait_for("the start", || !rig.processes().is_empty());
    rig.unpublish("csi-1", "a").unwrap();
    let error = starting.join().unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Aborted, "{error}");
    rig.check_empty();
    // The same for a staged volume.
    attributes.remove("csi.storage.k8s.io/ephemeral");
    let starting = {
        let (rig, attributes) = (Arc::clone(&rig), attributes.clone());
        std::thread::spawn(move || rig.stage("pv", &attributes))
    };
    wait_for("the start", || !rig.processes().is_empty());
    rig.unstage("pv").unwrap();
    assert_eq!(starting.join().unwrap().unwrap_err().code(), Code::Aborted);
    rig.check_empty();
}

/// The files of a pod's service account and a template of mount pods in `dir`; the arguments that name them.
fn service_account(dir: &Path) -> Vec<String> {
    let authority = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    for (name, text) in [
        ("token", "a-token"),
        ("namespace", "spurline"),
        ("ca.crt", authority.cert.pem().as_str()),
        ("mount-pod.yaml", "spec: {containers: [{name: mount, image: i}]}"),
    ] {
        std::fs::write(dir.join(name), text).unwrap();
    }
    let words = [("--service-account", dir.to_owned()), ("--pod-template", dir.join("mount-pod.yaml"))];
    words.into_iter().flat_map(|(flag, path)| [flag.to_owned(), path.display().to_string()]).collect()
}

/// The variables that name an API server at this port.
fn api_server_at(port: u16) -> Vec<(String, String)> {
    let port = port.to_string();
    [("KUBERNETES_SERVICE_HOST", "127.0.0.1"), ("KUBERNETES_SERVICE_PORT", port.as_str())].map(pair).into()
}

#[test]
fn a_silent_api_server_is_named_and_nothing_stays() {
    // It accepts connections and does not answer. The driver serves in spite of it.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let mut rig = DriverRig::with("node-1", |dir| {
        ([service_account(dir), vec!["--trust-inline-volumes".to_owned()]].concat(), api_server_at(port))
    });
    let attributes = rig.attributes();
    let inline = attributes.clone().into_iter().chain([pair(("csi.storage.k8s.io/ephemeral", "true"))]).collect();
    let check = |error: tonic::Status, why: &str| {
        let wanted = format!("127.0.0.1:{port} does not answer POST /api/v1/namespaces/spurline/pods: {why}");
        let text = error.message();
        assert!(text.contains(&wanted) && text.contains("NetworkPolicy") && !text.contains('\n'), "{error}");
        rig.check_empty();
    };
    check(rig.stage("pv", &attributes).unwrap_err(), "no connection within 5 s");
    check(rig.publish("csi-1", "a", &inline).unwrap_err(), "no connection within 5 s");
    assert!(!rig.target("a").exists());
    rig.unpublish("csi-1", "a").unwrap();
    rig.unstage("pv").unwrap();
    drop(silent);
    check(rig.stage("pv", &attributes).unwrap_err(), "Connection refused");
    rig.end_driver(rustix::process::Signal::TERM);
    assert!(!rig.path("csi.sock").exists());
}

#[test]
fn a_silent_registry_or_node_ends_the_start_and_is_named() {
    let Some(rig) = DriverRig::new() else { return };
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        for kind in ["static:", "coordinator://", "etcd://"] {
            let (rig, at) = (&rig, &at);
            scope.spawn(move || {
                let mut attributes = rig.attributes();
                attributes.insert("registry".into(), format!("{kind}{at}"));
                let error = rig.stage(&format!("pv-{}", &kind[..4]), &attributes).unwrap_err();
                assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
                let text = error.message();
                assert!(text.contains(at.as_str()) && text.contains("no answer") && text.contains("; "), "{error}");
                assert!(!text.contains('\n'), "{error}");
            });
        }
    });
    rig.check_empty();
}

#[test]
fn a_cache_node_that_stops_is_in_the_condition_and_delays_no_end() {
    let Some(rig) = DriverRig::new() else { return };
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut command = spurline_rig::program::spurline();
    command.args(["node", "--cache-size", "0", "--metrics", "none", "--group-port", &port, "--source"]);
    command.arg(rig.path("src")).stdin(Stdio::null()).stderr(std::fs::File::create(rig.path("node.log")).unwrap());
    let mut node = command.spawn().unwrap();
    let served = || std::fs::read_to_string(rig.path("node.log")).unwrap().contains("serving on");
    wait_for("the node", || served() || node.try_wait().unwrap().is_some());
    let mut attributes = rig.attributes();
    attributes.insert("registry".into(), format!("static:127.0.0.1:{port}"));
    let options = "cache-size=0,metrics=none,peer-timeout=3s,peer-silence=1s";
    attributes.insert("mountOptions".into(), options.into());
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    assert!(rig.read("a").is_ok() && !rig.condition("pv", "a").unwrap().abnormal);
    let signal = |which| rig.signal(node.id() as i32, which);
    signal(rustix::process::Signal::STOP);
    let wanted = format!("no cache node of the volume answers: 127.0.0.1:{port}");
    let mut seen = String::new();
    wait_for("the condition", || {
        // An error, not a hang.
        let _ = std::fs::metadata(rig.target("a").join("file"));
        let now = rig.condition("pv", "a").unwrap();
        seen = now.message;
        now.abnormal
    });
    assert!(seen.contains(&wanted), "{seen}");
    signal(rustix::process::Signal::CONT);
    wait_for("the node's return", || rig.read("a").is_ok() && !rig.condition("pv", "a").unwrap().abnormal);
    signal(rustix::process::Signal::STOP);
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
    node.kill().unwrap();
    node.wait().unwrap();
}

#[test]
fn a_driver_without_permission_ends_with_the_remedy() {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let dir = spurline_rig::program::tempdir();
    let at = |name: &str| dir.path().join(name);
    for (name, mode) in [("", 0o755), ("own", 0o755), ("roots", 0o700)] {
        std::fs::create_dir_all(at(name)).unwrap();
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    if chown(at("own"), Some(65534), None).is_err() {
        return spurline_testkit::skip("root", "only root can start the driver as another user");
    }
    let account = service_account(&at("roots"));
    let template = at("mount-pod.yaml");
    std::fs::copy(at("roots/mount-pod.yaml"), &template).unwrap();
    let process = ["--launcher", "process"].map(str::to_owned).to_vec();
    let pods = [account[..2].to_vec(), vec!["--pod-template".into(), template.display().to_string()]].concat();
    for (state, socket, more, says) in [
        ("roots/state", "own/csi.sock", &process, ["--state-dir", "as root"]),
        ("own/state", "roots/csi.sock", &process, ["roots/csi.sock", "run the driver as root"]),
        ("own/state", "own/csi.sock", &account, ["pod template", "ConfigMap"]),
        ("own/state", "own/csi.sock", &pods, ["service account's file", "run the driver as root"]),
    ] {
        let plain = spurline_rig::program::spurline();
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(plain.get_program());
        command.args(["k8s", "csi-driver", "--node-id=n", "--state-dir"]).arg(at(state));
        command.arg(format!("--endpoint=unix://{}", at(socket).display())).args(more).envs(api_server_at(1));
        let Ok(out) = command.output() else { return spurline_testkit::skip("setpriv", "there is no setpriv here") };
        let text = String::from_utf8(out.stderr).unwrap();
        if text.starts_with("setpriv:") {
            return spurline_testkit::skip("setpriv", "another user may not start the binary");
        }
        assert_eq!(out.status.code(), Some(3), "{text}");
        assert!(says.iter().all(|word| text.contains(word)) && text.contains("Permission denied"), "{text}");
        assert!(!at("own/csi.sock").exists());
    }
}

#[test]
fn calls_at_the_same_time_make_one_mount() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    for round in 0..3 {
        let stages: Vec<_> = (0..4)
            .map(|_| {
                let (rig, attributes) = (Arc::clone(&rig), attributes.clone());
                std::thread::spawn(move || rig.stage("pv", &attributes))
            })
            .collect();
        stages.into_iter().for_each(|call| call.join().unwrap().unwrap());
        assert_eq!(rig.launched().len(), 1, "round {round}");
        let pods: Vec<_> = (0..8)
            .map(|n| {
                let (rig, attributes) = (Arc::clone(&rig), attributes.clone());
                // Each twice.
                std::thread::spawn(move || rig.publish("pv", &format!("pod-{}", n / 2), &attributes))
            })
            .collect();
        pods.into_iter().for_each(|call| call.join().unwrap().unwrap());
        for n in 0..4 {
            assert!(rig.read(&format!("pod-{n}")).is_ok());
        }
        let ends: Vec<_> = (0..8)
            .map(|n| {
                let rig = Arc::clone(&rig);
                std::thread::spawn(move || rig.unpublish("pv", &format!("pod-{}", n / 2)))
            })
            .collect();
        ends.into_iter().for_each(|call| call.join().unwrap().unwrap());
        rig.unstage("pv").unwrap();
        rig.check_empty();
    }
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    /// The conformance test of Kubernetes. A volume is a view of its source without a size of its own, so the one test that
    /// wants two sizes of one name to be a conflict is left out.
    #[test]
    fn the_conformance_test_of_kubernetes_passes() {
        let Some(rig) = DriverRig::new() else { return };
        let Some(program) = spurline_testkit::go_program("csi-sanity", "csi-sanity") else { return };
        let parameters = rig.path("parameters.yaml");
        let source = rig.path("src");
        let text = format!("source: {}\nmountOptions: cache-size=0,metrics=none\n", source.display());
        std::fs::write(&parameters, text).unwrap();
        let out = std::process::Command::new(program)
            .arg(format!("--csi.endpoint=unix://{}", rig.path("csi.sock").display()))
            .arg(format!("--csi.mountdir={}", rig.path("target").display()))
            .arg(format!("--csi.stagingdir={}", rig.path("staging").display()))
            .arg(format!("--csi.testvolumeparameters={}", parameters.display()))
            .args(["--ginkgo.no-color", "--ginkgo.skip=already existing name and different capacity"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && text.contains("SUCCESS!"), "{text}");
        println!("{}", text.lines().rev().find(|line| line.contains("Passed")).unwrap_or_default());
        rig.check_empty();
    }
}
