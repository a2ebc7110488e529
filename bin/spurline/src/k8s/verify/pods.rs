//! The two pods that verify RDMA between nodes, as manifests and commands. Runs none of these.

use clap::Args;
use spurline_config::Fault;
use std::process::ExitCode;

/// The pods to print.
#[derive(Debug, Args)]
#[command(next_help_heading = "Pods to print")]
pub struct PodArgs {
    /// Resource that each pod requests
    #[arg(long, value_name = "PREFIX/NAME", default_value = "rdma/ib")]
    pub resource: String,
    /// Number of HCAs that each pod requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub count: u32,
    /// Node of a pod; give it twice [default: two different nodes]
    #[arg(long, value_name = "NAME")]
    pub node: Vec<String>,
    /// Image with the program spurline
    #[arg(long, value_name = "IMAGE", default_value = "spurline:latest")]
    pub image: String,
    /// Network attachments of the pods, for RoCE (`spurline k8s advise`)
    #[arg(long, value_name = "NAME[,NAME]")]
    pub network: Option<String>,
}

/// Prints the manifests to standard output, and the commands to standard error.
///
/// # Errors
/// When other than none or two nodes are named.
pub fn print_pods(args: &PodArgs) -> Result<ExitCode, Fault> {
    if !matches!(args.node.len(), 0 | 2) {
        return Err(Fault::usage(
            format!("--node is given {} times", args.node.len()),
            "name two nodes, or none for any two; or use --here, --peer or --read",
        ));
    }
    anstream::print!("{}---\n{}", pod_manifest(args, 0), pod_manifest(args, 1));
    anstream::eprint!(
        "\
save the two pods as verify.yaml, then:
  kubectl apply -f verify.yaml
  kubectl wait --for=condition=Ready --timeout=2m pod/spurline-verify-0 pod/spurline-verify-1
  kubectl exec spurline-verify-1 -- spurline k8s verify \\
      --peer $(kubectl get pod spurline-verify-0 -o jsonpath={{.status.podIP}})
  kubectl delete -f verify.yaml
"
    );
    Ok(ExitCode::SUCCESS)
}

fn pod_manifest(args: &PodArgs, number: usize) -> String {
    let network = match &args.network {
        Some(names) => format!("  annotations:\n    k8s.v1.cni.cncf.io/networks: {names}\n"),
        None => String::new(),
    };
    let place = match args.node.get(number) {
        Some(node) => format!(
            "  nodeSelector: {{kubernetes.io/hostname: {node}}}\n  hostname: {}\n",
            node.split('.').next().unwrap_or(node)
        ),
        None => "  affinity:
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector: {matchLabels: {app: spurline-verify}}
"
        .to_owned(),
    };
    let command = match number {
        0 => "[spurline, net, serve, --bind, all]",
        _ => "[sleep, infinity]",
    };
    let image = &args.image;
    let resource = &args.resource;
    let count = args.count;
    format!(
        "apiVersion: v1
kind: Pod
metadata:
  name: spurline-verify-{number}
  labels: {{app: spurline-verify}}
{network}spec:
{place}  restartPolicy: Never
  containers:
  - name: verify
    image: {image}
    command: {command}
    env:
    - name: NODE_NAME
      valueFrom: {{fieldRef: {{fieldPath: spec.nodeName}}}}
    securityContext:
      runAsUser: 0
      allowPrivilegeEscalation: false
      capabilities: {{drop: [ALL], add: [IPC_LOCK]}}
    resources:
      limits: {{{resource}: {count}}}
"
    )
}
