//! The arguments of `mount`, `node`, `gateway` and `coordinator`: the settings, which `spurline-config` describes, and the flags of
//! the program. Also the environment variables of flags.

use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, Args, Command};
use spurline_config::{RawCoordinator, RawGateway, RawMount, RawNode, RawTrust};
use std::path::PathBuf;

/// The arguments of `mount`.
#[derive(Debug, Clone, Args)]
pub struct MountArgs {
    /// The config file.
    #[command(flatten)]
    pub file: ConfigFileArgs,
    /// The settings.
    #[command(flatten)]
    pub settings: RawMount,
    /// Run in the background once the mount is ready
    ///
    /// The command returns 0 when the mount is ready, or the error and its exit code.
    #[arg(short = 'd', long, help_heading = "Mount", conflicts_with = "foreground")]
    pub background: bool,
    /// Stay in the foreground (the default)
    #[arg(short = 'f', long, help_heading = "Mount")]
    pub foreground: bool,
    /// Without effect: a mount never serves other mounts
    #[arg(long, hide = true)]
    pub no_sharing: bool,
    /// Flags without effect.
    #[command(flatten)]
    pub unused: UnusedArgs,
}

/// The arguments of `node`.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// The settings.
    #[command(flatten)]
    pub settings: RawNode,
    /// The config file.
    #[command(flatten)]
    pub file: ConfigFileArgs,
    /// Run in the background once the node serves
    #[arg(short = 'd', long, help_heading = "Node", conflicts_with = "foreground")]
    pub background: bool,
    /// Stay in the foreground (the default)
    #[arg(short = 'f', long, help_heading = "Node")]
    pub foreground: bool,
    /// Flags without effect.
    #[command(flatten)]
    pub unused: UnusedArgs,
}

/// The arguments of `gateway`.
#[derive(Debug, Clone, Args)]
pub struct GatewayArgs {
    /// The settings.
    #[command(flatten)]
    pub settings: RawGateway,
    /// The config file.
    #[command(flatten)]
    pub file: ConfigFileArgs,
    /// Run in the background once the gateway serves
    #[arg(short = 'd', long, help_heading = "S3", conflicts_with = "foreground")]
    pub background: bool,
    /// Stay in the foreground (the default)
    #[arg(short = 'f', long, help_heading = "S3")]
    pub foreground: bool,
    /// Flags without effect.
    #[command(flatten)]
    pub unused: UnusedArgs,
}

/// The arguments of `coordinator`.
#[derive(Debug, Clone, Args)]
pub struct CoordinatorArgs {
    /// The config file.
    #[command(flatten)]
    pub file: ConfigFileArgs,
    /// The settings.
    #[command(flatten)]
    pub settings: RawCoordinator,
    /// Run in the background once the coordinator serves
    #[arg(short = 'd', long, help_heading = "Coordinator", conflicts_with = "foreground")]
    pub background: bool,
    /// Stay in the foreground (the default)
    #[arg(short = 'f', long, help_heading = "Coordinator")]
    pub foreground: bool,
}

/// The config file of a service.
#[derive(Debug, Clone, Args)]
pub struct ConfigFileArgs {
    /// TOML file with the same keys as the flags
    ///
    /// A flag overrides its environment variable, which overrides the file, which overrides the default. Keys at the
    /// top level apply to all services; the tables [mount], [node], [gateway], [coordinator], [device-plugin] and [csi-driver]
    /// apply to one and override the top level.
    #[arg(long, value_name = "FILE", help_heading = "General", display_order = 0)]
    pub config: Option<PathBuf>,
}

/// Flags of other systems, accepted without effect.
#[derive(Debug, Clone, Args)]
pub struct UnusedArgs {
    /// Without effect: dio, the default of --iorpc-mode, does the same
    #[arg(long, hide = true)]
    pub cache_try_dio: bool,
    /// Without effect: mounts and nodes have one protocol, over TCP and RDMA
    #[arg(long, hide = true)]
    pub use_iorpc: bool,
}

/// The environment variable of a flag: `--cache-size` has `SPURLINE_CACHE_SIZE`.
pub fn env_name(long: &str) -> String {
    format!("SPURLINE_{}", long.to_ascii_uppercase().replace('-', "_"))
}

/// Variables that are accepted beside a flag's own: the flag, and the name. The first is of another system, the second an
/// earlier name.
pub const OTHER_VARIABLES: [(&str, &str); 2] =
    [("rdma-retry", "IORPC_RDMA_RETRY_DURATION"), ("log", "SPURLINE_LOG_FILE")];

/// Gives every long flag of a service its environment variable; yes/no flags also take yes, no, on and off.
pub fn with_environment(command: Command) -> Command {
    command.mut_args(with_variable)
}

/// Gives the flags that select and authenticate a group their environment variables, for commands that query a group.
/// Other flags of these commands have no variables.
pub fn with_group_environment(command: Command) -> Command {
    let trust = RawTrust::augment_args(Command::new("trust"));
    command.mut_args(|arg| match arg.get_long() {
        // The help names the variables, because the other flags of these commands have none.
        Some("registry" | "cache-group") => with_variable(arg).hide_env(false),
        _ if trust.get_arguments().any(|other| other.get_id() == arg.get_id()) => with_variable(arg).hide_env(false),
        _ => arg,
    })
}

fn with_variable(arg: Arg) -> Arg {
    let Some(long) = arg.get_long().map(str::to_owned) else { return arg };
    if matches!(long.as_str(), "help" | "version") {
        return arg;
    }
    let arg = if is_switch(&arg) { arg.value_parser(BoolishValueParser::new()) } else { arg };
    // The reference names the variables; in the help text they would double every line.
    let arg = arg.hide_env(true);
    let own = env_name(&long);
    let others = OTHER_VARIABLES.iter().filter(|(flag, _)| *flag == long).map(|(_, name)| (*name).to_owned());
    let aliases = arg.get_all_aliases().into_iter().flatten().map(env_name);
    let unset = std::env::var_os(&own).is_none();
    let name_in_use = others.chain(aliases).find(|name| unset && std::env::var_os(name).is_some());
    arg.env(name_in_use.unwrap_or(own))
}

/// Whether a flag takes no value.
pub fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;
    use spurline_config::{OriginConfig, RawNetwork, SourceUrl};
    use std::time::Duration;

    /// The settings without flags and without the environment.
    fn parsed<T: Args + FromArgMatches>(words: &[&str]) -> T {
        let command = T::augment_args(Command::new("test"));
        T::from_arg_matches(&command.try_get_matches_from([&["test"], words].concat()).unwrap()).unwrap()
    }

    #[test]
    fn flags_have_the_defaults_of_settings() {
        let source: SourceUrl = "s3://b".parse().unwrap();
        assert_eq!(parsed::<RawMount>(&["s3://b", "/m"]), RawMount::new(source.clone(), "/m".into()));
        assert_eq!(parsed::<RawGateway>(&["s3://b"]), RawGateway::new(source.clone()));
        assert_eq!(parsed::<RawNode>(&["--source", "s3://b"]), RawNode::new(vec![source]));
        assert_eq!(parsed::<RawCoordinator>(&[]), RawCoordinator::default());
    }

    /// A variable belongs to the whole process, so this test runs itself again with the variable set.
    #[test]
    fn another_system_s_variable_sets_the_flag_it_stands_for() {
        let (flag, other) = OTHER_VARIABLES[0];
        if std::env::var_os(other).is_none_or(|value| value != "7m") {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", &name]).env(other, "7m").env_remove(env_name(flag));
            let out = again.output().unwrap();
            let said = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && said.contains("1 passed"), "{name}: {said}");
            return;
        }
        let command = with_environment(RawNetwork::augment_args(Command::new("mount")));
        let set = |words: &[&str]| {
            let matches = command.clone().try_get_matches_from([&["mount"], words].concat()).unwrap();
            RawNetwork::from_arg_matches(&matches).unwrap().rdma_retry
        };
        assert_eq!(set(&[]), Duration::from_secs(7 * 60));
        assert_eq!(set(&["--rdma-retry", "9s"]), Duration::from_secs(9));
    }

    /// One rule gives each flag of a service its variable.
    #[test]
    fn each_flag_has_the_variable_of_its_name() {
        let command = crate::cli::cli_command();
        for service in crate::config_file::SERVICE_COMMANDS {
            let sub = crate::config_file::find_service(&command, service).unwrap();
            for arg in sub.get_arguments() {
                let Some(long) = arg.get_long() else { continue };
                let variable = arg.get_env().map(|name| name.to_string_lossy().into_owned());
                assert_eq!(variable, Some(env_name(long)), "{service} --{long}");
            }
        }
        assert_eq!(env_name("log"), "SPURLINE_LOG");
        assert_eq!(env_name("log-filter"), "SPURLINE_LOG_FILTER");
    }

    /// The flags of the origin had another name before.
    #[test]
    fn the_earlier_names_of_flags_and_their_variables_are_accepted() {
        let variable = "SPURLINE_UNDER_STALL_TIMEOUT";
        if std::env::var_os(variable).is_none_or(|value| value != "7s") {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", &name]).env(variable, "7s").env_remove("SPURLINE_ORIGIN_STALL_TIMEOUT");
            let out = again.output().unwrap();
            let text = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && text.contains("1 passed"), "{name}: {text}");
            return;
        }
        let command = with_environment(OriginConfig::augment_args(Command::new("mount")));
        let matches = command.try_get_matches_from(["mount", "--under-timeout", "9s"]).unwrap();
        let set = OriginConfig::from_arg_matches(&matches).unwrap();
        assert_eq!((set.timeout, set.stall_timeout), (Duration::from_secs(9), Duration::from_secs(7)));
    }
}
