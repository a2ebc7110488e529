// Command kubelet-devices runs the device manager of the real kubelet (k8s.io/kubernetes), with its socket in a directory
// that is given, and does what the lines of its standard input say. Each line has one line of JSON as its answer.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	_ "unsafe" // for linkname

	cadvisorapi "github.com/google/cadvisor/info/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	stub "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// The constructor with a directory of its own is not exported.
//
//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(logger klog.Logger, socketPath string, topology []cadvisorapi.Node, store topologymanager.Store) (*devicemanager.ManagerImpl, error)

type sources struct{}

func (sources) AddSource(string) {}
func (sources) AllReady() bool   { return true }

type kubelet struct {
	dir      string
	numa     int
	policy   string
	manager  *devicemanager.ManagerImpl
	topology topologymanager.Manager
	pods     []*v1.Pod
}

func (k *kubelet) start() error {
	logger := klog.Background()
	var nodes []cadvisorapi.Node
	for id := 0; id < k.numa; id++ {
		nodes = append(nodes, cadvisorapi.Node{Id: id})
	}
	topology, err := topologymanager.NewManager(nodes, k.policy, "container", nil)
	if err != nil {
		return err
	}
	manager, err := newManagerImpl(logger, filepath.Join(k.dir, "kubelet.sock"), nodes, topology)
	if err != nil {
		return err
	}
	topology.AddHintProvider(logger, manager)
	active := func() []*v1.Pod { return k.pods }
	err = manager.Start(logger, active, sources{}, containermap.NewContainerMap(), sets.New[string]())
	k.manager, k.topology = manager, topology
	return err
}

// admit does what kubelet does before it starts a pod: topology hints, alignment, allocation.
func (k *kubelet) admit(name, res string, count int64) map[string]any {
	quantity := v1.ResourceList{v1.ResourceName(res): *resource.NewQuantity(count, resource.DecimalSI)}
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)},
		Spec: v1.PodSpec{Containers: []v1.Container{{
			Name:      "main",
			Resources: v1.ResourceRequirements{Limits: quantity, Requests: quantity},
		}}},
	}
	begin := time.Now()
	result := k.topology.Admit(&lifecycle.PodAdmitAttributes{Pod: pod})
	took := time.Since(begin)
	if !result.Admit {
		return map[string]any{"admitted": false, "reason": result.Reason, "message": result.Message, "us": took.Microseconds()}
	}
	k.pods = append(k.pods, pod)
	options, err := k.manager.GetDeviceRunContainerOptions(context.Background(), pod, &pod.Spec.Containers[0])
	if err != nil {
		return map[string]any{"admitted": false, "message": err.Error(), "us": took.Microseconds()}
	}
	answer := map[string]any{"admitted": true, "us": took.Microseconds()}
	if options != nil {
		devices := []string{}
		for _, d := range options.Devices {
			devices = append(devices, d.PathInContainer+" "+d.Permissions)
		}
		cdi := []string{}
		for _, d := range options.CDIDevices {
			cdi = append(cdi, d.Name)
		}
		envs := map[string]string{}
		for _, e := range options.Envs {
			envs[e.Name] = e.Value
		}
		answer["devices"], answer["cdi"], answer["envs"] = devices, cdi, envs
	}
	slots := []string{}
	for res, devices := range k.manager.GetDevices(name, "main") {
		for id := range devices {
			slots = append(slots, res+" "+id)
		}
	}
	answer["slots"] = slots
	return answer
}

func (k *kubelet) remove(name string) {
	kept := []*v1.Pod{}
	for _, pod := range k.pods {
		if pod.Name != name {
			kept = append(kept, pod)
		}
	}
	k.pods = kept
	k.topology.RemoveContainer(name)
	k.manager.UpdateAllocatedDevices()
}

func (k *kubelet) capacity() map[string]any {
	capacity, allocatable, removed := k.manager.GetCapacity()
	plain := func(list v1.ResourceList) map[string]int64 {
		out := map[string]int64{}
		for name, quantity := range list {
			out[string(name)] = quantity.Value()
		}
		return out
	}
	return map[string]any{"capacity": plain(capacity), "allocatable": plain(allocatable), "removed": removed}
}

// stub serves a resource by the plugin of kubelet's own tests, which decides nothing: what is measured is kubelet.
func (k *kubelet) stub(res string, count int) error {
	devices := []*pluginapi.Device{}
	for slot := 0; slot < count; slot++ {
		devices = append(devices, &pluginapi.Device{ID: fmt.Sprintf("slot-%d", slot), Health: pluginapi.Healthy})
	}
	ctx := context.Background()
	plugin := stub.NewDevicePluginStub(klog.Background(), devices, filepath.Join(k.dir, "stub.sock"), res, false, false)
	plugin.SetAllocFunc(func(*pluginapi.AllocateRequest, map[string]*pluginapi.Device) (*pluginapi.AllocateResponse, error) {
		return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{{}}}, nil
	})
	if err := plugin.Start(ctx); err != nil {
		return err
	}
	return plugin.Register(ctx, filepath.Join(k.dir, "kubelet.sock"), res, "")
}

func (k *kubelet) run(words []string) (any, error) {
	switch words[0] {
	case "capacity":
		return k.capacity(), nil
	case "pod":
		count, err := strconv.ParseInt(words[3], 10, 64)
		if err != nil {
			return nil, err
		}
		return k.admit(words[1], words[2], count), nil
	case "stub":
		count, err := strconv.Atoi(words[2])
		if err != nil {
			return nil, err
		}
		return map[string]any{}, k.stub(words[1], count)
	case "remove":
		k.remove(words[1])
		return map[string]any{}, nil
	case "restart":
		if err := k.manager.Stop(klog.Background()); err != nil {
			return nil, err
		}
		return map[string]any{}, k.start()
	case "stop":
		return map[string]any{}, k.manager.Stop(klog.Background())
	case "start":
		return map[string]any{}, k.start()
	}
	return nil, fmt.Errorf("unknown command %q", words[0])
}

func main() {
	klog.InitFlags(nil)
	k := &kubelet{}
	flag.StringVar(&k.dir, "dir", "", "kubelet's directory of device plugins")
	flag.IntVar(&k.numa, "numa", 2, "NUMA nodes of the machine")
	flag.StringVar(&k.policy, "policy", "none", "policy of the topology manager")
	flag.Parse()
	if err := k.start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(`{"ready":true}`)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) == 0 {
			continue
		}
		answer, err := k.run(words)
		if err != nil {
			answer = map[string]any{"error": err.Error()}
		}
		line, _ := json.Marshal(answer)
		fmt.Println(string(line))
	}
}
