{{/* The file that `trainermon controller --config` reads. */}}
{{- define "trainermon.controller.settings" -}}
{{- $controller := .Values.controller -}}
{{- $service := printf "%s-controller" (include "trainermon.fullname" .) -}}
{{- $namespace := include "trainermon.namespace" . -}}
discovery:
  refresh_s: {{ $controller.discovery.refreshSeconds }}
  {{- with $controller.discovery.agents }}
  agents:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq $controller.discovery.method "dns" }}
  dns: ["{{ include "trainermon.fullname" . }}-agents.{{ $namespace }}.svc:{{ .Values.agent.port }}"]
  {{- else if eq $controller.discovery.method "kubernetes" }}
  kubernetes:
    label_selector: {{ include "trainermon.selectorText" . | quote }}
    port: trainermon
    namespace: {{ $namespace }}
  {{- end }}
state_dir: /var/lib/trainermon
host: 0.0.0.0
port: {{ $controller.port }}
allowed_hosts:
  {{- $own := list $service (printf "%s.%s" $service $namespace) (printf "%s.%s.svc" $service $namespace) (printf "%s.%s.svc.cluster.local" $service $namespace) }}
  {{- toYaml (concat $own $controller.allowedHosts) | nindent 2 }}
agents:
  https: {{ not (empty .Values.access.tls.existingSecret) }}
  plain_http: {{ $controller.plainHttp }}
  {{- if .Values.access.tls.existingSecret }}
  ca_file: /etc/trainermon/tls/ca.crt
  {{- with .Values.access.tls.serverName }}
  server_name: {{ . }}
  {{- end }}
  {{- end }}
limits:
  max_per_hour: {{ $controller.limits.maxPerHour }}
  max_age_s: {{ $controller.limits.maxAgeSeconds }}
{{- end }}

{{/* The agents' pods as `kubectl get pods --selector` takes it. */}}
{{- define "trainermon.selectorText" -}}
{{- $selector := include "trainermon.agentSelector" . | fromYaml -}}
{{- $terms := list -}}
{{- range $key, $value := $selector.matchLabels -}}
{{- $terms = append $terms (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- range $selector.matchExpressions -}}
{{- if eq .operator "Exists" -}}
{{- $terms = append $terms .key -}}
{{- else if eq .operator "DoesNotExist" -}}
{{- $terms = append $terms (printf "!%s" .key) -}}
{{- else -}}
{{- $terms = append $terms (printf "%s %s (%s)" .key (lower .operator) (join "," .values)) -}}
{{- end -}}
{{- end -}}
{{- join "," $terms -}}
{{- end }}

{{- define "trainermon.controller.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ if .root.Values.access.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end }}
{{ toYaml .settings }}
{{- end }}

{{/* A spread without a selector would spread over all pods of the namespace. */}}
{{- define "trainermon.controller.topologySpreadConstraints" -}}
{{- $labels := merge (include "trainermon.selectorLabels" . | fromYaml) (dict "app.kubernetes.io/component" "controller") -}}
{{- range .Values.controller.topologySpreadConstraints }}
- {{ toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels))) | nindent 2 | trim }}
{{- end }}
{{- end }}
