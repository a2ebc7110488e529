//! The Debian package, the archive and the image of `scripts/package`, made from this build: what they contain, that they
//! install, run and go without a trace, and that services start with the settings they bring.

use serde_json::Value;
use spurline_rig::program::{spurline, tempdir, wait_for};
use spurline_testkit::skip;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The packages, made once.
struct BuiltPackages {
    dir: tempfile::TempDir,
}

impl BuiltPackages {
    fn path(&self, ending: &str) -> PathBuf {
        let found = std::fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().path());
        found.into_iter().find(|path| path.to_str().unwrap().ends_with(ending)).unwrap()
    }
}

/// `None` where there are no tools to make packages with.
fn packages() -> Option<&'static BuiltPackages> {
    static PACKAGES: LazyLock<Option<BuiltPackages>> = LazyLock::new(|| {
        let missing = ["dpkg-deb", "strip", "systemd-sysusers"].into_iter().find(|tool| !is_installed(tool));
        if let Some(tool) = missing {
            skip("packages", &format!("packages can't be made here: {tool} is not installed"));
            return None;
        }
        let dir = tempdir();
        let from = dir.path().join("programs");
        std::fs::create_dir(&from).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_spurline"), from.join("spurline")).unwrap();
        let mut command = script("package");
        command.arg("--fast").arg("--from").arg(&from).arg("--out").arg(dir.path());
        output_of(command.args(["deb", "tarball"]));
        Some(BuiltPackages { dir })
    });
    PACKAGES.as_ref()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

fn script(name: &str) -> Command {
    Command::new(root().join("scripts").join(name))
}

fn is_installed(program: &str) -> bool {
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&dirs).any(|dir| dir.join(program).exists())
}

fn output_of(command: &mut Command) -> String {
    let out = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{command:?}: {}\n{text}{}", out.status, String::from_utf8_lossy(&out.stderr));
    text
}

/// All files and folders below a directory.
fn files_below(dir: &Path) -> BTreeSet<String> {
    let list = output_of(Command::new("find").arg(dir).args(["-mindepth", "1", "-printf", "%P\\n"]));
    list.lines().map(str::to_owned).collect()
}

/// The words of a unit's ExecStart without the program, for the settings in `deploy/config`.
fn started_by(unit: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join("deploy/systemd").join(unit)).unwrap();
    assert!(text.contains("Type=notify\n"), "{unit} waits until the service is ready");
    let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/spurline ")).unwrap();
    let settings = root().join("deploy/config/spurline.toml");
    line.replace("/etc/spurline/spurline.toml", settings.to_str().unwrap()).split(' ').map(str::to_owned).collect()
}

#[test]
fn services_start_with_the_settings_of_the_package_and_report_to_systemd() {
    let dir = tempdir();
    let at = |name: &str| dir.path().join(name);
    let source = at("source");
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("file"), "bytes").unwrap();
    std::fs::create_dir(at("mountpoint")).unwrap();
    let mut units: Vec<_> = ["spurline-coordinator.service", "spurline-node.service", "spurline-gateway@.service"]
        .map(|unit| (unit, "false"))
        .into();
    if spurline_rig::program::fuse() {
        units.extend([("spurline-mount@.service", "false"), ("spurline-mount@.service", "true")]);
    }
    for (unit, recovers) in units {
        let notified = at("notified");
        let socket = UnixDatagram::bind(&notified).unwrap();
        socket.set_read_timeout(Some(spurline_rig::program::LIMIT)).unwrap();
        let place = |word: String| match word.as_str() {
            "${SOURCE}" => source.display().to_string(),
            "${MOUNTPOINT}" => at("mountpoint").display().to_string(),
            _ => word,
        };
        let mut service = spurline()
            .args(started_by(unit).into_iter().map(place))
            .env("NOTIFY_SOCKET", &notified)
            .env("SPURLINE_STATE_FILE", at("state.json"))
            .env("SPURLINE_CACHE_DIR", at("cache"))
            .env("SPURLINE_RUNTIME_DIR", at("run"))
            .env("SPURLINE_METRICS", "none")
            .env("SPURLINE_SOURCE", &source)
            .envs(unit.contains("gateway").then_some(("SPURLINE_S3_LISTEN", "127.0.0.1:0")))
            .env("SPURLINE_RECOVER", recovers)
            .spawn()
            .unwrap();
        let mut got = [0; 16];
        let len = socket.recv(&mut got).unwrap_or_else(|error| {
            let _ = service.kill();
            panic!("{unit}: no READY=1: {error}, {:?}", service.wait());
        });
        assert_eq!(&got[..len], b"READY=1", "{unit}");
        if unit.contains("mount") {
            assert_eq!(std::fs::read(at("mountpoint").join("file")).unwrap(), b"bytes");
        }
        let id = rustix::process::Pid::from_raw(i32::try_from(service.id()).unwrap()).unwrap();
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        wait_for("its end", || service.try_wait().unwrap().is_some());
        assert!(service.wait().unwrap().success(), "{unit}");
        std::fs::remove_file(&notified).unwrap();
    }
}

#[test]
fn alert_rules_fire_for_what_they_are_about() {
    if !is_installed("promtool") {
        // Debian's package of it starts a server, so scripts/setup leaves it out.
        skip("promtool", "promtool is not installed (apt-get install prometheus): alert rules are not checked by it");
        return;
    }
    output_of(Command::new("promtool").args(["check", "rules"]).arg(root().join("deploy/prometheus/alerts.yml")));
    output_of(Command::new("promtool").args(["test", "rules"]).arg(root().join("tests/prometheus/alerts.yml")));
}

#[test]
fn a_log_is_rotated_while_its_process_writes_to_it() {
    if !is_installed("logrotate") {
        skip("logrotate", "logrotate is not installed (scripts/setup test-all does it): its setting is not tried");
        return;
    }
    let dir = tempdir();
    let log = dir.path().join("spurline.log");
    let setting = dir.path().join("setting");
    let text = std::fs::read_to_string(root().join("deploy/logrotate/spurline")).unwrap();
    std::fs::write(&setting, text.replace("/var/log/spurline.log", log.to_str().unwrap())).unwrap();
    let mut service = spurline()
        .args(["coordinator", "--group-port", "0", "--state-file", "none", "--metrics", "none", "--log"])
        .arg(&log)
        .env("SPURLINE_RUNTIME_DIR", dir.path())
        .spawn()
        .unwrap();
    let lines = |path: &Path| std::fs::read_to_string(path).unwrap_or_default().lines().count();
    wait_for("its first lines", || lines(&log) > 0);
    let mut rotate = Command::new("logrotate");
    output_of(rotate.arg("--force").arg("--state").arg(dir.path().join("state")).arg(&setting));
    assert!(lines(&dir.path().join("spurline.log.1")) > 0 && lines(&log) == 0);
    let id = rustix::process::Pid::from_raw(i32::try_from(service.id()).unwrap()).unwrap();
    rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
    wait_for("its end", || service.try_wait().unwrap().is_some());
    let last = std::fs::read(&log).unwrap();
    assert!(!last.is_empty() && !last.contains(&0), "what it wrote since begins at the file's start: {last:?}");
}

/// The units under a systemd that started a virtual machine: `tests/systemd/units` says what has to hold.
#[test]
#[ignore = "takes minutes in a virtual machine; .ci/nightly runs it"]
fn units_do_under_systemd_what_the_document_says() {
    let Some(packages) = packages() else { return };
    let dir = tempdir();
    let (tree, newer) = (dir.path().join("tree"), dir.path().join("newer.deb"));
    output_of(Command::new("dpkg-deb").arg("-R").arg(packages.path(".deb")).arg(&tree));
    let control = tree.join("DEBIAN/control");
    let version = format!("Version: {}-", env!("CARGO_PKG_VERSION"));
    let text = std::fs::read_to_string(&control).unwrap();
    std::fs::write(&control, text.replace(&format!("{version}1\n"), &format!("{version}2\n"))).unwrap();
    output_of(Command::new("dpkg-deb").args(["--root-owner-group", "-Zgzip", "-z1", "--build"]).arg(&tree).arg(&newer));
    let mut command = script("vm");
    // Units with a keeper need Linux 6.9.
    command.args(["--backports", "--systemd", "--net", "none", "--seconds", "1800", "bash"]);
    command.arg(root().join("tests/systemd/units")).arg(packages.path(".deb")).arg(&newer);
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    println!("{text}{}", String::from_utf8_lossy(&out.stderr));
    match out.status.code() {
        Some(3) => skip("systemd", text.lines().find_map(|line| line.strip_prefix("SKIP: ")).unwrap_or(&text)),
        Some(0) => assert!(text.ends_with("all units passed\n")),
        other => panic!("the units do not do what the document says ({other:?}), see above"),
    }
}

/// An image as an OCI layout, made once; `None` where its packages can't be had.
fn image() -> Option<&'static Path> {
    static IMAGE: LazyLock<Option<(tempfile::TempDir, PathBuf)>> = LazyLock::new(|| {
        let dir = tempdir();
        let from = dir.path().join("programs");
        std::fs::create_dir(&from).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_spurline"), from.join("spurline")).unwrap();
        let mut command = script("package");
        command.arg("--fast").arg("--from").arg(&from).arg("--out").arg(dir.path()).arg("image");
        let out = command.output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        if out.status.code() == Some(3) {
            skip("image", text.lines().find_map(|line| line.strip_prefix("SKIP: ")).unwrap_or(&text));
            return None;
        }
        assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
        let path = PathBuf::from(text.trim());
        Some((dir, path))
    });
    IMAGE.as_ref().map(|(_, path)| path.as_path())
}

fn json_file(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The file of a descriptor, with its digest and size compared.
fn blob(image: &Path, descriptor: &Value) -> PathBuf {
    let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
    let path = image.join("blobs/sha256").join(digest);
    assert_eq!(path.metadata().unwrap().len(), descriptor["size"].as_u64().unwrap());
    assert!(output_of(Command::new("sha256sum").arg(&path)).starts_with(digest), "{descriptor}");
    path
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn packages_contain_what_they_promise() {
        let Some(packages) = packages() else { return };
        let dir = tempdir();
        let deb = dir.path().join("deb");
        output_of(Command::new("dpkg-deb").arg("-R").arg(packages.path(".deb")).arg(&deb));
        let tar = dir.path().join("tar");
        std::fs::create_dir(&tar).unwrap();
        output_of(Command::new("tar").arg("-xzf").arg(packages.path(".tar.gz")).arg("-C").arg(&tar));
        let tar = std::fs::read_dir(&tar).unwrap().next().unwrap().unwrap().path();

        let both = ["bin/spurline", "lib/sysusers.d/spurline.conf", "share/spurline/alerts.yml"];
        let examples = ["mount.env", "gateway.env", "gpu-node.tar.zst", "faulty-node.tar.zst"];
        let examples = examples.map(|name| format!("share/doc/spurline/examples/{name}"));
        for file in both.into_iter().chain(examples.iter().map(String::as_str)) {
            assert!(deb.join("usr").join(file).exists() && tar.join("usr/local").join(file).exists(), "{file}");
        }
        let settings = ["spurline/spurline.toml", "spurline/mounts", "spurline/gateways", "logrotate.d/spurline"];
        let settings = settings.map(|name| format!("etc/{name}"));
        for file in
            ["sbin/mount.spurline", "sbin/mount.fuse.spurline"].into_iter().chain(settings.iter().map(String::as_str))
        {
            assert!(deb.join(file).symlink_metadata().is_ok() && tar.join(file).symlink_metadata().is_ok(), "{file}");
        }
        for file in ["man1/spurline.1.gz", "man1/spurline-k8s-device-plugin.1.gz", "man8/mount.spurline.8.gz"] {
            assert!(deb.join("usr/share/man").join(file).exists(), "{file}");
        }
        for file in ["LICENSE", "THIRD-PARTY.gz", "INSTALL.md"] {
            assert!(tar.join(file).exists(), "{file}");
        }
        // Units name the program where it is.
        let unit = |dir: &Path| std::fs::read_to_string(dir.join("spurline-node.service")).unwrap();
        assert!(unit(&deb.join("lib/systemd/system")).contains("ExecStart=/usr/bin/spurline node "));
        assert!(unit(&tar.join("usr/local/lib/systemd/system")).contains("ExecStart=/usr/local/bin/spurline node "));
        // The archive's program runs from any directory, and mount(8) would find it.
        let ran = output_of(Command::new(tar.join("usr/local/bin/spurline")).arg("--version"));
        assert!(ran.contains(env!("CARGO_PKG_VERSION")), "{ran}");
        assert_eq!(std::fs::read_link(tar.join("sbin/mount.spurline")).unwrap(), Path::new("/usr/local/bin/spurline"));

        let control = std::fs::read_to_string(deb.join("DEBIAN/control")).unwrap();
        assert!(!control.contains('@') || control.matches('@').count() == 1, "unfilled: {control}");
        for part in ["libc6 (>= 2.", "fuse3", "ibverbs-providers"] {
            assert!(control.contains(part), "{part} in\n{control}");
        }
        let installed = std::fs::read_to_string(tar.join("INSTALL.md")).unwrap();
        let units = ["spurline-mount@", "spurline-gateway@"].map(|unit| installed.matches(unit).count());
        assert_eq!(units.iter().sum::<usize>(), installed.matches('@').count());

        if is_installed("lintian") {
            output_of(Command::new("lintian").args(["--fail-on", "error,warning"]).arg(packages.path(".deb")));
        } else {
            skip(
                "lintian",
                "lintian is not installed (scripts/setup test does it): the Debian package is not checked by it",
            );
        }
    }

    #[test]
    fn a_package_installs_and_a_purge_leaves_nothing() {
        let Some(packages) = packages() else { return };
        if !rustix::process::geteuid().is_root() {
            skip("packages", "only root can install packages into a directory");
            return;
        }
        let dir = tempdir();
        let root = dir.path();
        let make = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        make("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
        make("etc/group", "root:x:0:\n");
        make("etc/shadow", "root:*:19000:0:99999:7:::\n");
        make("etc/gshadow", "root:*::\n");
        make("var/lib/dpkg/status", "");
        for tool in ["sh", "mkdir"] {
            make(&format!("bin/{tool}"), "");
            std::fs::set_permissions(root.join("bin").join(tool), Permissions::from_mode(0o755)).unwrap();
        }
        for dir in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "var/log", "etc/systemd/system"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        let before = files_below(root);
        let dpkg = |words: &[&OsStr]| {
            // Scripts of the package run outside, on the directory.
            let mut command = Command::new("dpkg");
            command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
            command.arg(format!("--root={}", root.display())).args(["--force-script-chrootless", "--force-depends"]);
            output_of(command.args(words));
        };
        dpkg(&["--install".as_ref(), packages.path(".deb").as_ref()]);
        let users = std::fs::read_to_string(root.join("etc/passwd")).unwrap();
        assert!(users.contains("spurline:"), "{users}");
        if is_installed("systemd-analyze") {
            let mut command = Command::new("systemd-analyze");
            command.args(["verify", "--man=no", "--recursive-errors=no"]).arg(format!("--root={}", root.display()));
            command.args(["spurline-node.service", "spurline-coordinator.service"]);
            command.args(["spurline-mount@data.service", "spurline-gateway@data.service"]);
            let out = command.output().unwrap();
            assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
        } else {
            skip("systemd", "systemd-analyze is not installed: units are not verified");
        }
        // Settings survive a removal; state and cache of the services go with a purge.
        make("var/lib/spurline/coordinator.json", "{}");
        make("var/cache/spurline-node/block", "bytes");
        make("var/cache/spurline-gateway/data/block", "bytes");
        make("var/log/spurline.log", "line");
        make("var/log/spurline.log.1.gz", "lines");
        let wants = root.join("etc/systemd/system/multi-user.target.wants");
        std::fs::create_dir(&wants).unwrap();
        let unit = "/lib/systemd/system/spurline-gateway@.service";
        std::os::unix::fs::symlink(unit, wants.join("spurline-gateway@data.service")).unwrap();
        dpkg(&["--remove".as_ref(), "spurline".as_ref()]);
        assert!(root.join("etc/spurline/spurline.toml").exists() && !root.join("usr/bin/spurline").exists());
        dpkg(&["--purge".as_ref(), "spurline".as_ref()]);
        assert!(!std::fs::read_to_string(root.join("etc/passwd")).unwrap().contains("spurline"));
        let left: Vec<String> = files_below(root)
            .difference(&before)
            // Records of dpkg and of systemd's helper, and backups of the list of users.
            .filter(|path| {
                !["var/lib/dpkg", "var/lib/systemd", "var/cache", "etc/.pwd.lock"]
                    .iter()
                    .any(|own| path.starts_with(own))
            })
            .filter(|path| !(path.starts_with("etc/") && path.ends_with('-')))
            .cloned()
            .collect();
        assert!(left.is_empty(), "left behind: {left:?}");
        for dir in ["var/cache/spurline-node", "var/cache/spurline-gateway"] {
            assert!(!root.join(dir).exists(), "{dir}");
        }
    }

    #[test]
    fn an_image_is_a_valid_oci_layout() {
        let Some(image) = image() else { return };
        assert_eq!(json_file(&image.join("oci-layout"))["imageLayoutVersion"], "1.0.0");
        let index = json_file(&image.join("index.json"));
        let [entry] = index["manifests"].as_array().unwrap().as_slice() else { panic!("{index}") };
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(entry["annotations"]["org.opencontainers.image.ref.name"], version);
        let manifest = json_file(&blob(image, entry));
        let config = json_file(&blob(image, &manifest["config"]));
        let layers = manifest["layers"].as_array().unwrap();
        let ids = config["rootfs"]["diff_ids"].as_array().unwrap();
        assert_eq!(layers.len(), ids.len());
        assert_eq!(config["history"].as_array().unwrap().len(), ids.len());
        for (layer, id) in layers.iter().zip(ids) {
            let unpacked = format!("gzip -dc {} | sha256sum", blob(image, layer).display());
            let sum = output_of(Command::new("sh").args(["-c", &unpacked]));
            assert!(id.as_str().unwrap().ends_with(sum.split(' ').next().unwrap()), "{id} {sum}");
        }
        // Nothing that no manifest names.
        assert_eq!(files_below(&image.join("blobs/sha256")).len(), layers.len() + 2);

        // What 'k8s render' makes is for this image: its name and version, its program, its user.
        let deployed = std::fs::read_to_string(root().join("deploy/plain/spurline.yaml")).unwrap();
        assert!(deployed.contains(&format!("image: spurline:{version}\n")));
        assert_eq!(config["config"]["Entrypoint"], serde_json::json!(["/usr/bin/spurline"]));
        assert!(config["config"]["Env"][0].as_str().unwrap().contains("/usr/bin"));
        let user = config["config"]["User"].as_str().unwrap().split(':').next().unwrap();
        assert!(deployed.contains(&format!("runAsUser: {user}\n")), "no container of deploy/ runs as {user}");

        let named = format!("{}:{version}", image.display());
        for (tool, words) in [("skopeo", vec!["inspect", "--raw"]), ("umoci", vec!["stat", "--image"])] {
            if !is_installed(tool) {
                skip(
                    tool,
                    &format!("{tool} is not installed (scripts/setup test does it): it does not check the image"),
                );
                continue;
            }
            let place = if tool == "skopeo" { format!("oci:{named}") } else { named.clone() };
            output_of(Command::new(tool).args(words).arg(place));
        }
    }

    /// The programs of an image run in it, with nothing of this machine but its kernel.
    #[test]
    fn an_image_runs_as_its_user_and_mounts_as_root() {
        let Some(image) = image() else { return };
        if !rustix::process::geteuid().is_root()
            || !Command::new("unshare").args(["--mount", "true"]).status().unwrap().success()
        {
            skip("image", "only root can change the root directory to an image's");
            return;
        }
        let dir = tempdir();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let entry = &json_file(&image.join("index.json"))["manifests"][0];
        for layer in json_file(&blob(image, entry))["layers"].as_array().unwrap() {
            output_of(
                Command::new("tar").arg("-xzpf").arg(blob(image, layer)).arg("-C").arg(&root).arg("--numeric-owner"),
            );
        }
        if is_installed("umoci") {
            let bundle = dir.path().join("bundle");
            let named = format!("{}:{}", image.display(), env!("CARGO_PKG_VERSION"));
            output_of(Command::new("umoci").args(["unpack", "--image", &named]).arg(&bundle));
            assert_eq!(files_below(&bundle.join("rootfs")), files_below(&root));
        }
        std::fs::create_dir(root.join("data")).unwrap();
        std::fs::write(root.join("data/file"), "bytes of the image\n").unwrap();
        let within = |script: &str| {
            let prepare = "set -e; mount -t proc proc \"$0/proc\"; mount --rbind /dev \"$0/dev\"; mount --rbind /sys \"$0/sys\"; ";
            let mut command = Command::new("unshare");
            command.args(["--mount", "sh", "-c", &format!("{prepare}{script}")]).arg(&root).env_clear();
            output_of(command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"))
        };
        let as_user = "chroot --userspec=65532:65532 \"$0\" spurline";
        assert!(within(&format!("{as_user} --version")).contains(env!("CARGO_PKG_VERSION")));
        let listed: Value = serde_json::from_str(&within(&format!("{as_user} net list --json"))).unwrap();
        assert!(listed.is_object() || listed.is_array());
        // Every library that a program or a provider of verbs names is there.
        let wanted = within(
            "for file in usr/bin/spurline usr/bin/fusermount3 $(cd \"$0\"; ls usr/lib/*/libibverbs/*.so usr/lib/*/librdmacm.so.1 \
         usr/lib/*/libibumad.so.3); do chroot \"$0\" \"$(cd \"$0\"; ls lib/*/ld-linux-*)\" --list \"/$file\"; done",
        );
        assert!(wanted.contains("libnl-3.so.200 => /lib/") && !wanted.contains("not found"), "{wanted}");
        assert!(files_below(&root).iter().any(|file| file.contains("/libibverbs/libmlx5-rdmav")));
        if spurline_rig::program::fuse() {
            let read = within(
                "root=$0; run() { chroot \"$root\" \"$@\"; }
             run spurline mount /data /mnt --cache-size 0 --metrics none -d >&2
             run /bin/sh -c 'cat /mnt/file'
             run spurline umount /mnt >&2",
            );
            assert_eq!(read, "bytes of the image\n");
        }
    }
}
