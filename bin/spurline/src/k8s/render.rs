//! `spurline k8s render`: prints the manifests of the crate `manifests`, or writes these to a directory.

use super::mount_words::words_of_mount;
use crate::net::table::WARN;
use clap::{Args, ValueEnum};
use spurline_config::{Fault, HostLimits};
use spurline_csi::{MountRequest, VolumeSettings};
use spurline_fabric::Severity;
use spurline_kube_devices::{ResourceConfig, read_config};
use spurline_manifests::{ClusterValues, DEFAULT_VALUES, FIRST_LINE, ManifestForm, RenderedFile, render};
use std::collections::{BTreeSet, HashMap};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
Examples:
  Look at what would be applied, and apply it:
    spurline k8s render --set nodes.sources='[s3://datasets]'
    spurline k8s render --values values.yaml | kubectl apply -f -
  With the configuration of RDMA devices that was found on the nodes:
    spurline k8s discover > config.json
    spurline k8s render --values values.yaml \\
        --set-file devicePlugin.config=config.json
  The values with their meanings, as the start of a file:
    spurline k8s render --print-values > values.yaml
  A Kustomize base, or a Helm chart, whose defaults are these values:
    spurline k8s render --values values.yaml --form kustomize --out base
    spurline k8s render --form helm --out chart \\
        && helm install spurline ./chart -n spurline --create-namespace";

/// The forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FormArg {
    /// One text for kubectl apply -f
    Yaml,
    /// A directory for kubectl apply -k
    Kustomize,
    /// A chart for helm install
    Helm,
}

/// The arguments of `k8s render`.
#[derive(Debug, Args)]
pub struct RenderArgs {
    /// File of values in YAML; it needs only what differs from the defaults
    #[arg(long, value_name = "FILE")]
    pub values: Option<PathBuf>,
    /// One value, over those of the file; repeat for more
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One value that is the content of a file, over those of --values; repeat for more
    #[arg(long, value_name = "KEY=FILE")]
    pub set_file: Vec<String>,
    /// What to make
    #[arg(long, value_name = "FORM", default_value = "yaml")]
    pub form: FormArg,
    /// Write files to this directory [default: print]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print the default values with their meanings
    #[arg(long, conflicts_with_all = ["values", "set", "set_file", "form", "out"])]
    pub print_values: bool,
}

/// Runs the command.
///
/// # Errors
/// When a value is wrong or a file can't be read or written.
pub fn run(args: RenderArgs) -> Result<ExitCode, Fault> {
    if args.print_values {
        return print(DEFAULT_VALUES);
    }
    let mut values = ClusterValues::defaults()?;
    if let Some(file) = &args.values {
        values = values.with_file(&file.display().to_string(), &read(file, "--values")?)?;
    }
    for setting in &args.set_file {
        let Some((key, file)) = setting.split_once('=') else {
            let remedy = "write --set-file KEY=FILE, such as devicePlugin.config=config.json";
            return Err(Fault::usage(format!("--set-file {setting} names no file"), remedy));
        };
        values = values.with_text(key, file, &read(Path::new(file), "--set-file")?)?;
    }
    for setting in &args.set {
        values = values.with_setting(setting)?;
    }
    if let Some(warning) = check_devices(&values)? {
        anstream::eprintln!("{WARN}warning{WARN:#} {warning}");
    }
    check_mount_options(&values)?;
    // A chart gets values at the installation.
    if let Some(note) = placeholder_note(&values).filter(|_| args.form != FormArg::Helm) {
        anstream::eprintln!("{WARN}note{WARN:#} {note}");
    }
    let form = match args.form {
        FormArg::Yaml => ManifestForm::Yaml,
        FormArg::Kustomize => ManifestForm::Kustomize,
        FormArg::Helm => ManifestForm::Helm,
    };
    let files = render(&values, form)?;
    match (args.out, form) {
        (Some(dir), _) => {
            for file in &files {
                write(&dir, file)?;
            }
            remove_others(&dir, &files)?;
            println!("{} files are in {}", files.len(), dir.display());
            Ok(ExitCode::SUCCESS)
        }
        (None, ManifestForm::Yaml) => print(&files.iter().map(|file| file.text.as_str()).collect::<String>()),
        (None, _) => Err(Fault::usage("a Kustomize base or a chart has many files", "give --out DIR")),
    }
}

fn read(file: &Path, flag: &str) -> Result<String, Fault> {
    std::fs::read_to_string(file).map_err(|e| {
        Fault::missing(format!("the file {}: {e}", file.display()), format!("name a readable file with {flag}"))
    })
}

/// The values that name things of a specific cluster, with the key that switches the objects on, and the flag that sets the
/// value.
const CLUSTER_PLACEHOLDERS: [(&str, &[&str], &str); 3] = [
    ("image", &[], "image=REGISTRY/spurline:TAG"),
    ("nodes.sources", &["nodes.enabled"], "nodes.sources='[s3://BUCKET]'"),
    ("storageClass.source", &["csi.enabled", "storageClass.enabled"], "storageClass.source=s3://BUCKET"),
];

/// A note about values that were not given although no cluster has things of the defaults' names.
fn placeholder_note(values: &ClusterValues) -> Option<String> {
    let mut kept = Vec::new();
    let mut settings = Vec::new();
    for (key, switches, setting) in CLUSTER_PLACEHOLDERS {
        let is_used = switches.iter().all(|switch| values.is_on(switch));
        if let Some(value) = values.find(key).filter(|_| is_used && !values.is_given(key)) {
            kept.push(format!("{key} ({})", value.to_string().replace('"', "")));
            settings.push(format!("--set {setting}"));
        }
    }
    let note = format!("placeholders, to be replaced by your own: {}; {}", kept.join(", "), settings.join(" "));
    (!kept.is_empty()).then_some(note)
}

/// Checks the configuration of the device plugin, and that pods request the plugin's resources. Returns a warning about a
/// resource with another prefix, which another plugin may make, such as that of SR-IOV.
fn check_devices(values: &ClusterValues) -> Result<Option<String>, Fault> {
    let Some(config) = values.find("devicePlugin.config").filter(|_| values.is_on("devicePlugin.enabled")) else {
        return Ok(None);
    };
    let name = "devicePlugin.config";
    let reading = read_config(&config.to_string(), name);
    let Some(config) = reading.config else {
        let wrong = reading.findings.into_iter().find(|finding| finding.severity == Severity::Error);
        let (subject, what, remedy) = wrong.map(|f| (f.subject, f.evidence, f.remedy)).unwrap_or_default();
        let place = if subject == name { subject } else { format!("{name}: {subject}") };
        return Err(Fault::usage(format!("{place}: {what}"), remedy));
    };
    let known: Vec<String> = config.resources.iter().map(ResourceConfig::resource).collect();
    let test = if values.is_on("test.enabled") { values.text("test.rdmaResource") } else { "" };
    let wanted = [("nodes.rdmaResource", values.text("nodes.rdmaResource")), ("test.rdmaResource", test)];
    let unknown = wanted.into_iter().filter(|(_, name)| !name.is_empty() && !known.iter().any(|one| one == name));
    let mut warning = None;
    for (key, name) in unknown {
        let what = format!("{key} is {name}, which no entry of devicePlugin.config makes: the pods stay Pending");
        if known.iter().any(|one| first_path_part(one) == first_path_part(name)) {
            return Err(Fault::usage(what, format!("write one of {}, or add the entry", known.join(", "))));
        }
        warning.get_or_insert(format!("{what}, unless another device plugin does"));
    }
    Ok(warning)
}

fn first_path_part(name: &str) -> Option<String> {
    name.split('/').next().map(str::to_owned)
}

/// Checks the options of the StorageClass with the parser of `spurline mount`.
fn check_mount_options(values: &ClusterValues) -> Result<(), Fault> {
    if !values.is_on("csi.enabled") || !values.is_on("storageClass.enabled") {
        return Ok(());
    }
    let options = values.find("storageClass.mountOptions").and_then(|list| list.as_array()).cloned();
    let options: Vec<String> = options.into_iter().flatten().filter_map(|o| Some(o.as_str()?.to_owned())).collect();
    let mut attributes = HashMap::from([("source".to_owned(), values.text("storageClass.source").to_owned())]);
    attributes.insert("memory".to_owned(), values.text("csi.memory").to_owned());
    if values.is_on("nodes.enabled") {
        // Any registry: only the options are checked.
        attributes.insert("registry".to_owned(), "coordinator://spurline-coordinator:7400".to_owned());
    }
    let settings = VolumeSettings::parse(&attributes, &options)?;
    // The limit of memory is the driver's default, which options may raise.
    let default_memory = settings.memory.unwrap_or_default();
    let settings = VolumeSettings { memory: None, ..settings };
    let request = MountRequest { settings: &settings, own_flags: &[], mountpoint: Path::new("/mnt"), default_memory };
    // This machine is no part of the cluster.
    let host = HostLimits { memory_bytes: None, ..HostLimits::detect() };
    let words = words_of_mount(request, &host, false)
        .map_err(|fault| Fault { what: format!("storageClass.mountOptions: {}", fault.what), ..fault })?;
    let is_directory = values.text("storageClass.source").starts_with('/');
    if words.writable && values.is_on("nodes.enabled") && !values.is_on("nodes.writable") && !is_directory {
        return Err(Fault::usage(
            "storageClass.mountOptions: rw: the nodes of these manifests take no changes of a bucket",
            "set nodes.writable to true, with keys that may write, or leave rw out",
        ));
    }
    let stages = words.words.iter().any(|word| word == "--stage");
    if stages && values.is_on("nodes.enabled") && values.text("nodes.stageSize").is_empty() {
        return Err(Fault::usage(
            "storageClass.mountOptions: stage: the nodes of these manifests keep no staged files",
            "set nodes.stageSize, such as 500G, or leave stage out",
        ));
    }
    Ok(())
}

/// Removes files of an earlier run that this run did not make: files of a chart would be applied.
fn remove_others(dir: &Path, files: &[RenderedFile]) -> Result<(), Fault> {
    let parents: BTreeSet<PathBuf> =
        files.iter().filter_map(|f| Some(dir.join(&f.path).parent()?.to_owned())).collect();
    for path in parents.iter().filter_map(|parent| std::fs::read_dir(parent).ok()).flatten().flatten() {
        let path = path.path();
        let is_ours = files.iter().any(|file| dir.join(&file.path) == path);
        if !is_ours
            && path.extension().is_some_and(|end| end == "yaml")
            && std::fs::read_to_string(&path).is_ok_and(|text| text.starts_with(FIRST_LINE))
        {
            std::fs::remove_file(&path)
                .map_err(|e| Fault::failed(format!("{}: {e}", path.display()), "remove it: it is of an earlier run"))?;
            println!("removed {}, which was of an earlier run", path.display());
        }
    }
    Ok(())
}

fn write(dir: &Path, file: &RenderedFile) -> Result<(), Fault> {
    let path = dir.join(&file.path);
    let made = std::fs::create_dir_all(path.parent().unwrap_or(dir)).and_then(|()| std::fs::write(&path, &file.text));
    made.map_err(|e| Fault::failed(format!("{}: {e}", path.display()), "give --out a writable directory"))
}

fn print(text: &str) -> Result<ExitCode, Fault> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Fault::failed(format!("standard output: {e}"), "")),
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(settings: &[&str]) -> ClusterValues {
        settings.iter().fold(ClusterValues::defaults().unwrap(), |values, one| values.with_setting(one).unwrap())
    }

    #[test]
    fn placeholders_are_named_until_they_are_replaced() {
        let note = |settings: &[&str]| placeholder_note(&with(settings));
        let all = note(&["storageClass.enabled=true"]).unwrap();
        assert!(all.contains("image (spurline:0.1.0), nodes.sources ([s3://datasets]), storageClass.source"), "{all}");
        let image = "image=registry.example.com/spurline:1";
        let rest = note(&[image, "nodes.enabled=false", "storageClass.enabled=true"]).unwrap();
        assert!(
            !rest.contains("nodes.sources") && !rest.contains("image") && rest.contains("storageClass.source=s3"),
            "{rest}"
        );
        // Given values are none, also where they are the defaults.
        assert_eq!(note(&[image, "nodes.sources=[s3://datasets]", "storageClass.source=s3://datasets"]), None);
    }

    #[test]
    fn devices_are_those_of_the_configuration() {
        let warning = |settings: &[&str]| check_devices(&with(settings)).unwrap();
        assert_eq!(warning(&["nodes.rdmaResource=rdma/roce", "test.enabled=true"]), None);
        assert_eq!(warning(&["devicePlugin.enabled=false", "nodes.rdmaResource=other/name"]), None);
        let other = warning(&["nodes.rdmaResource=openshift.io/mlx_vf"]).unwrap();
        assert!(other.contains("unless another device plugin does"), "{other}");
        let negative = "devicePlugin.config={configList: [{resourceName: ib, rdmaHcaMax: -1}]}";
        for (setting, says) in [
            (
                "nodes.rdmaResource=rdma/hca",
                "nodes.rdmaResource is rdma/hca, which no entry of devicePlugin.config makes",
            ),
            ("devicePlugin.config={configList: []}", "devicePlugin.config: configList is "),
            ("devicePlugin.config={}", "devicePlugin.config: configList is "),
            (negative, "rdmaHcaMax"),
        ] {
            let said = check_devices(&with(&[setting])).unwrap_err().to_string();
            assert!(said.contains(says) && !said.contains('\n'), "{setting}: {said}");
        }
        let said = check_devices(&with(&["test.enabled=true", "test.rdmaResource=rdma/x"])).unwrap_err().to_string();
        assert!(said.contains("write one of rdma/ib, rdma/roce"), "{said}");
    }

    #[test]
    fn mount_options_are_those_of_spurline_mount() {
        check_mount_options(&with(&["storageClass.mountOptions=[rdma-network=ib0:ib1, max-readahead=64M]"])).unwrap();
        check_mount_options(&with(&["csi.memory=4000Gi"])).unwrap();
        check_mount_options(&with(&["storageClass.mountOptions=[rw]", "nodes.writable=true"])).unwrap();
        let staged = ["storageClass.mountOptions=[rw, stage]", "nodes.writable=true"];
        check_mount_options(&with(&[&staged[..], &["nodes.stageSize=500G"]].concat())).unwrap();
        let said = check_mount_options(&with(&staged)).unwrap_err().to_string();
        assert!(said.contains("keep no staged files") && said.contains("nodes.stageSize"), "{said}");
        check_mount_options(&with(&["nodes.enabled=false", "storageClass.source=/mnt/nfs"])).unwrap();
        for (setting, says) in [
            (
                "storageClass.mountOptions=[cachesize=1G]",
                "storageClass.mountOptions: -o cachesize=1G: unknown mount option",
            ),
            ("storageClass.mountOptions=[rw]", "take no changes of a bucket"),
            ("csi.memory=8Mi", "buffer-size"),
        ] {
            let said = check_mount_options(&with(&[setting])).unwrap_err().to_string();
            assert!(said.contains(says) && !said.contains('\n'), "{setting}: {said}");
        }
    }

    #[test]
    fn files_of_an_earlier_run_are_removed_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let file = RenderedFile { path: "nodes.yaml".into(), text: FIRST_LINE.into() };
        write(dir.path(), &file).unwrap();
        for (name, text) in [("test.yaml", FIRST_LINE), ("own.yaml", "kind: Pod\n"), ("notes.txt", FIRST_LINE)] {
            std::fs::write(at(name), text).unwrap();
        }
        remove_others(dir.path(), &[file]).unwrap();
        let is_there = ["nodes.yaml", "test.yaml", "own.yaml", "notes.txt"].map(|name| at(name).exists());
        assert_eq!(is_there, [true, false, true, true]);
    }
}
