// kubeone is etcd, the Kubernetes control plane, the kubelet, kube-proxy and kubectl linked into one binary. One file
// instead of seven: the programs share nearly all of their packages, so it is a third of the size, and running processes
// share its text pages. The name it is called by (a symbolic link) chooses the program, as in busybox.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	_ "time/tzdata" // CronJob time zones on a machine without a zone database

	"go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var programs = map[string]func(){
	"etcd":                    func() { etcdmain.Main(os.Args) },
	"kube-apiserver":          func() { os.Exit(cli.Run(apiserver.NewAPIServerCommand())) },
	"kube-controller-manager": func() { os.Exit(cli.Run(controllermanager.NewControllerManagerCommand())) },
	"kube-scheduler":          func() { os.Exit(cli.Run(scheduler.NewSchedulerCommand())) },
	"kubelet":                 func() { os.Exit(cli.Run(kubelet.NewKubeletCommand(context.Background()))) },
	"kube-proxy":              func() { os.Exit(cli.Run(proxy.NewProxyCommand())) },
	"kubectl":                 runKubectl,
}

// runKubectl parses -v before cobra does (as upstream's main does), and prints errors in kubectl's own wording.
func runKubectl() {
	logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
}

func main() {
	name := filepath.Base(os.Args[0])
	if programs[name] == nil && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	run, known := programs[name]
	if !known {
		names := make([]string, 0, len(programs))
		for program := range programs {
			names = append(names, program)
		}
		slices.Sort(names)
		fmt.Fprintf(os.Stderr, "kubeone: %q is none of its programs (%s): call it by a link of that name, or as kubeone PROGRAM [FLAG...]\n",
			name, strings.Join(names, ", "))
		os.Exit(2)
	}
	run()
}
