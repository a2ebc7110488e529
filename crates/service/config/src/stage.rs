//! Staged files of a node: settings and checks. Opens no disk and no registry.

use crate::group::{GroupConfig, check_name};
use crate::settings::unused_flags;
use crate::values::SourceUrl;
use spurline_membership::url::RegistryUrl as Registry;
use spurline_types::Size;
use spurline_types::fault::Fault;
use std::str::FromStr as _;

settings! {
    /// Staged files: written through this node, and kept on disks of two nodes until the store has the objects.
    #[command(next_help_heading = "Writing to a bucket")]
    pub struct RawStage {
        /// Room on the cache disks for files of buckets that wait for their upload (staged files); 0 keeps none
        ///
        /// With --writable, cache disks, and a registry of coordinator:// or etcd://. Mounts with --stage, and folders with
        /// such a rule, write so; each file is on disks of two nodes of different failure domains.
        #[arg(long, value_name = "SIZE")]
        pub stage_size: Size = Size::from_str("0"),
        /// Machines that may fail together have the same name, such as a rack; a staged file is in two failure domains
        /// [default: the host's name]
        ///
        /// With --stage-size.
        #[arg(long, value_name = "NAME")]
        pub failure_domain: Option<String>,
    }
}

/// The staged files that a node keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageConfig {
    /// Most bytes of staged files on the cache disks; more than 0.
    pub size_bytes: u64,
    /// The failure domain; never empty.
    pub failure_domain: String,
}

/// The other settings of a node that staged files depend on.
pub(crate) struct StageNeeds<'a> {
    /// The node takes changes.
    pub writes: bool,
    pub sources: &'a [SourceUrl],
    /// The node has cache disks.
    pub has_disks: bool,
    /// The group, in a registry where the node registers.
    pub group: Option<&'a GroupConfig>,
    /// A registry where the node does not register.
    pub other_registry: Option<&'a Registry>,
}

impl RawStage {
    /// The checked settings; `None` for a node that keeps no staged files.
    pub(crate) fn check(&self, needs: &StageNeeds<'_>) -> Result<Option<StageConfig>, Fault> {
        if self.stage_size.bytes() == 0 {
            let given = [("--failure-domain", self.failure_domain.is_some())];
            return match unused_flags(&given, "a node without --stage-size keeps no staged files") {
                None => Ok(None),
                Some(why) => Err(Fault::usage(why, "give --stage-size too, or leave --failure-domain out")),
            };
        }
        self.check_node(needs)?;
        check_registry(needs)?;
        let failure_domain = match &self.failure_domain {
            Some(name) => name.clone(),
            None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        };
        check_name("--failure-domain", &failure_domain)?;
        Ok(Some(StageConfig { size_bytes: self.stage_size.bytes(), failure_domain }))
    }

    /// Checks that the node takes files of buckets, and has a disk for these.
    fn check_node(&self, needs: &StageNeeds<'_>) -> Result<(), Fault> {
        let size = self.stage_size;
        if !needs.writes {
            return Err(Fault::usage(
                format!("--stage-size {size} has no effect on a node that takes no changes"),
                "give --writable too, or leave it out",
            ));
        }
        if !needs.sources.iter().any(|source| source.scheme() != "file") {
            return Err(Fault::usage(
                format!("--stage-size {size}: all sources are directories, and only files of buckets are staged"),
                "name a bucket with --source s3://BUCKET, or leave --stage-size out",
            ));
        }
        if !needs.has_disks {
            return Err(Fault::usage(
                format!(
                    "--stage-size {size} with --cache-size 0: staged files lie on the cache disks, and there is none"
                ),
                "give --cache-size and --cache-dir, or leave --stage-size out",
            ));
        }
        Ok(())
    }
}

/// Checks that the registry gives terms.
fn check_registry(needs: &StageNeeds<'_>) -> Result<(), Fault> {
    const REMEDY: &str = "give --registry coordinator://HOST:PORT or etcd://HOST:PORT, or leave --stage-size out";
    match (needs.group, needs.other_registry) {
        (Some(_), _) => Ok(()),
        (None, None) => Err(Fault::usage(
            "--stage-size without --registry: staged files need two nodes, and this node has no group",
            REMEDY,
        )),
        (None, Some(registry)) => Err(Fault::usage(
            format!(
                "--stage-size with --registry {registry}: such a registry gives no terms, so two nodes could both order the changes \
                 of a file"
            ),
            REMEDY,
        )),
    }
}

#[cfg(test)]
mod tests {
    use crate::{CacheSize, HostLimits, NodeConfig, RawNode};
    use spurline_types::Size;
    use spurline_types::fault::{ExitKind, Fault};

    type Change = fn(&mut RawNode);

    fn check(change: Change) -> Result<NodeConfig, Fault> {
        let mut node = RawNode::new(vec!["s3://b".parse().unwrap(), "/srv".parse().unwrap()]);
        node.writable = true;
        node.stage.stage_size = Size::mib(512);
        node.group.registry = Some("coordinator://head:7400".parse().unwrap());
        node.group_port = 7401;
        change(&mut node);
        node.check(&HostLimits { root: true, ..HostLimits::detect() })
    }

    #[test]
    fn a_node_keeps_staged_files_of_a_size_in_a_domain() {
        let stage = check(|_| {}).unwrap().stage.unwrap();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        assert_eq!((stage.size_bytes, stage.failure_domain), (512 << 20, host));
        let stage = check(|node| node.stage.failure_domain = Some("rack-7".into())).unwrap().stage.unwrap();
        assert_eq!(stage.failure_domain, "rack-7");
        assert_eq!(check(|node| node.stage.stage_size = Size(0)).unwrap().stage, None);
        let etcd = |node: &mut RawNode| node.group.registry = Some("etcd://a:2379,b:2379".parse().unwrap());
        assert!(check(etcd).unwrap().stage.is_some());
    }

    #[test]
    fn a_node_that_can_keep_no_staged_files_is_refused_with_the_remedy() {
        let cases: [(Change, [&str; 2]); 9] = [
            (|node| node.writable = false, ["takes no changes", "--writable"]),
            (|node| node.source = vec!["/srv".parse().unwrap()], ["all sources are directories", "s3://BUCKET"]),
            (|node| node.cache.cache_size = CacheSize::None, ["--cache-size 0", "--cache-dir"]),
            (|node| node.group.registry = None, ["two nodes", "coordinator://HOST:PORT or etcd://"]),
            (|node| node.group.registry = Some("static:a:1,b:1".parse().unwrap()), ["static:a:1,b:1", "no terms"]),
            (
                |node| node.group.registry = Some("dns:nodes:1".parse().unwrap()),
                ["dns:nodes:1", "two nodes could both"],
            ),
            (|node| node.stage.failure_domain = Some("a b".into()), ["--failure-domain 'a b'", "without blanks"]),
            (|node| node.stage.failure_domain = Some(String::new()), ["--failure-domain ''", "a word"]),
            (
                |node| (node.stage.stage_size, node.stage.failure_domain) = (Size(0), Some("rack".into())),
                ["--failure-domain is not used", "--stage-size too"],
            ),
        ];
        for (change, says) in cases {
            let fault = check(change).unwrap_err();
            let said = fault.to_string();
            assert!(says.iter().all(|part| said.contains(part)), "{said}");
            assert_eq!(fault.code, ExitKind::Usage, "{said}");
        }
    }
}
